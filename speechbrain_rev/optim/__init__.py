"""Optimizers with 8-bit or 32-bit states."""

from typing import TYPE_CHECKING, Any

from speechbrain_rev.optim.optimizer import CLASSES, build_optimizer, state_bytes

_BY_CLASS_NAME = {public.__name__: public for public in CLASSES.values()}
globals().update(_BY_CLASS_NAME)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [*_BY_CLASS_NAME, "build_optimizer", "state_bytes"]
