"""torchaudio, or one sentence that names the version to install beside this torch.

Packages that import SpeechBrain or torchaudio import this module first: pip cannot keep
torch and torchaudio together, as torchaudio 2.11.0 requires no torch at all and 2.11.1
any from 2.11 on.
"""

from importlib.metadata import PackageNotFoundError, version


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
    raise ImportError(mismatch(*versions, error)) from error
