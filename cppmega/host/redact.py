"""Keep credentials out of records: a manifest is copied, compared and sent around.

Of the environment only the variables on a list are recorded, those that matter to training. From
these, and from command lines, anything that looks like a credential by its name or its value is
left out. A secret that neither its name nor its value gives away cannot be recognized: it belongs
in a variable that is not on the list, or in a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cppmega.host import env

HIDDEN = "(not recorded)"

_FAMILIES = (
    *(env.PREFIX, "CUDA", "CUBLAS_", "CUDNN_", "NCCL_", "NVTE_", "NVSHMEM_", "PYTORCH_", "TORCH"),
    *("TRITON_", "TL_", "TILELANG_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GLOO_", "UCX_", "FI_"),
    *("UB_", "MEGATRON_", "MALLOC_", "GLIBC_"),
)
"""Prefixes of the variables of libraries that training code uses and that involve no accounts."""
_LISTED = """
LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV CONDA_PREFIX MASTER_ADDR MASTER_PORT
PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONOPTIMIZE PYTHONSAFEPATH PYTHONNOUSERSITE
PYTHONUSERBASE PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONUNBUFFERED PYTHONWARNINGS
PYTHONDEVMODE PYTHONMALLOC PYTHONFAULTHANDLER PYTHONUTF8 PYTHONSTARTUP PYTHONEXECUTABLE
PYTHONTRACEMALLOC PYTHONASYNCIODEBUG PYTHONINSPECT PYTHONBREAKPOINT PYTHONPLATLIBDIR
NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE NVIDIA_REQUIRE_CUDA
NVIDIA_PRODUCT_NAME NVIDIA_PYTORCH_VERSION NVIDIA_BUILD_ID
SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES
SLURM_JOB_PARTITION SLURM_JOB_QOS SLURM_NODELIST SLURM_NNODES SLURM_NTASKS
SLURM_NTASKS_PER_NODE SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURM_CPUS_PER_TASK
SLURM_CPUS_ON_NODE SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE SLURM_MEM_PER_NODE
SLURM_CPU_BIND SLURM_RESTART_COUNT SLURM_CLUSTER_NAME SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID
HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE HF_DATASETS_CACHE HF_ENDPOINT
WANDB_MODE WANDB_PROJECT WANDB_ENTITY WANDB_NAME WANDB_DIR WANDB_RUN_ID WANDB_RUN_GROUP
WANDB_RESUME WANDB_TAGS WANDB_BASE_URL WANDB_DISABLED
"""
_NAMES = frozenset(_LISTED.split())
_SECRET_NAME = re.compile(
    "KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|JWT|COOKIE|PRIVATE|SIGNATURE|BEARER|LOGIN|ACCOUNT",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(
    r"--?(?:.*[-_])?(?:(?:api|access|secret|private|wandb)[-_]?key|secret|passw(?:or)?d|passphrase|"
    r"credentials?|auth|jwt|cookie|bearer|token)",
    re.IGNORECASE,
)
_OF_A_TOKENIZER = re.compile(
    r".*(?:bos|eos|eod|pad|unk|cls|sep|mask|special)[-_]token", re.IGNORECASE
)
_USER_OF_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
_FIELD = re.compile(
    r"([?&;][\w.-]*(?:token|key|sig|signature|secret|password|auth|credential)[\w.-]*=)[^&;\s]+",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"  # a JSON web token
    r"|(?:hf|sk|pk|rk|ghp|gho|ghu|ghs|ghr|glpat|nvapi|npm|dop_v1|xox[abprs])[_-][\w-]{10,}"
    r"|github_pat_\w{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,})"
    r"|\b(?:Bearer|Basic)\s+[\w.~+/=-]{8,}"
)
_RANDOM = re.compile(r"[0-9a-f]{32,}|(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+_=-]{32,}")
"""A value that looks randomly generated; identifiers of GPUs are excepted."""


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that training code reads, without secrets."""
    return {
        name: text(value)
        for name, value in sorted(variables.items())
        if (name in _NAMES or name.startswith(_FAMILIES))
        and not _SECRET_NAME.search(name)
        and not (_RANDOM.fullmatch(value) and not value.startswith(("GPU-", "MIG-")))
    }


def words(line: Iterable[str]) -> list[str]:
    """A command line without the values of secret options, and without secrets in its words."""
    shown: list[str] = []
    hide = False
    for word in line:
        option, equals, _ = word.partition("=")
        secret = bool(_SECRET_OPTION.fullmatch(option) and not _OF_A_TOKENIZER.fullmatch(option))
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        elif secret and equals:
            shown.append(f"{option}={HIDDEN}")
        else:
            shown.append(text(word))
        hide = secret and not equals
    return shown


def text(value: str) -> str:
    """A text without credentials in URLs, and without tokens of known shapes."""
    value = _USER_OF_URL.sub(rf"\1{HIDDEN}@", value)
    value = _FIELD.sub(rf"\1{HIDDEN}", value)
    return _SHAPES.sub(HIDDEN, value)


def everywhere(value: Any) -> Any:
    """A JSON value with `text` applied to every string in it."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {name: everywhere(one) for name, one in value.items()}
    return [everywhere(one) for one in value] if isinstance(value, list | tuple) else value
