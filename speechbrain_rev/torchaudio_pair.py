"""torchaudio, or one sentence that names the version to install beside this torch.

``data``, ``inference`` and ``training`` import this module before SpeechBrain, which
imports torchaudio. pip does not check that the two fit: torchaudio 2.11.0 declares no
torch, and 2.11.1 declares ``torch>=2.11``.
"""

from importlib.metadata import PackageNotFoundError, version

import torch  # noqa: F401, a torch that cannot be imported has its own error


def torchaudio_for(torch_version: str) -> str:
    """Name the torchaudio that imports beside a version of torch.

    Parameters
    ----------
    torch_version : str
        Such as "2.14.1+cu130".

    Returns
    -------
    str
        A version of torchaudio.

    Examples
    --------
    >>> torchaudio_for("2.12.0"), torchaudio_for("2.15.0+cpu")
    ('2.11.0', '2.11.1')
    """
    minor = int(torch_version.split(".")[1])
    return "2.11.0" if minor < 13 else "2.11.1"


def mismatch(torch_version: str, torchaudio_version: str, reason: BaseException) -> str:
    """Describe a torchaudio that cannot be imported: both versions, and what to install.

    Parameters
    ----------
    torch_version, torchaudio_version : str
        What is installed.
    reason : BaseException
        What the import raised.

    Returns
    -------
    str
        A sentence.
    """
    fitting = torchaudio_for(torch_version)
    remedy = f"pip install torchaudio=={fitting}"
    if "+" in torch_version:
        remedy += ", from the index of that torch"
    if torchaudio_version.partition("+")[0] == fitting:
        remedy = "install both from one index, for one CUDA"
    return (
        f"torchaudio {torchaudio_version} cannot be imported beside torch {torch_version} "
        f"({' '.join(str(reason).split())}): {remedy}."
    )


try:
    import torchaudio  # noqa: F401
except (ImportError, OSError, RuntimeError) as error:
    try:
        versions = version("torch"), version("torchaudio")
    except PackageNotFoundError:
        raise error from None
    raise ImportError(mismatch(*versions, error)) from None
