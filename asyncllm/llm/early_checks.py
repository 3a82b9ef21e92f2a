"""What is wrong with a start, as far as it shows before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.executor.memory.limits import wanted_length
from asyncllm.kernels.cuda_driver import count_gpus
from asyncllm.models.loading.weight_files import check_weights
from asyncllm.models.spec import ModelSpec
from asyncllm.system.suggest import did_you_mean
from asyncllm.text.model_files import check_tokenizer
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS

#: Attention kernels that run on GPUs only.
_GPU_ATTENTION: Final = ("triton", "flashinfer")


def check_early(
    config: EngineConfig, folder: Path, text_folder: Path, spec: ModelSpec, num_machines: int = 1
) -> None:
    """Check the device, files and names; what depends on the device's memory comes later.

    Args:
        num_machines: those that share the ranks of ``tp``.

    Raises:
        ModelError: something is missing or damaged.
        BadRequest: a name is unknown.
    """
    _check_parsers(config)
    _check_device(config, config.dp * config.tp // num_machines)
    check_tokenizer(text_folder)
    if config.device != "sim":  # which has the positions of its profile, and no weights
        wanted_length(config, spec)
        if config.load_format == "auto":
            check_weights(folder)
    if config.trace is not None:
        trace = Path(config.trace)
        if trace.is_dir() or not os.access(trace.absolute().parent, os.W_OK):
            raise ModelError(f"trace: {config.trace} cannot be written", param="trace")


def _check_parsers(config: EngineConfig) -> None:
    for field, formats in (("tool_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        name, known = getattr(config, field), sorted({*formats, "auto", "none"})
        if name not in known:
            raise BadRequest(
                f"{field}: there is no format {name!r}, only {', '.join(known)}"
                f"{did_you_mean(name, known)}",
                param=field,
            )


def _check_device(config: EngineConfig, wanted: int) -> None:
    """Check that there are as many GPUs as named; ``auto`` takes the CPU where there is none."""
    on_gpu = config.device.startswith("cuda")
    if config.device == "sim" or not (on_gpu or config.attention in _GPU_ATTENTION):
        return
    count, first = 0 if config.device == "cpu" else count_gpus(), config.gpu or 0
    if not on_gpu and count == 0:
        raise ModelError(f"attention {config.attention}: it needs a CUDA device", param="attention")
    if not on_gpu or first + wanted <= count:
        return
    param = "device" if first >= count else "dp" if config.dp > 1 else "tp"
    many = f" and {wanted} are needed" if wanted > 1 and count else ""
    raise ModelError(f"device {config.device}: {_gpus_here(count)}{many}", param=param)


def _gpus_here(count: int) -> str:
    if count:
        return f"this machine has {count} CUDA device{'s' if count > 1 else ''}, from cuda:0 on"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = f", and CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else ""
    return f"this machine has no CUDA device{hidden}; without one, use --device cpu"
