"""From a configuration to a running engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncllm import demo
from asyncllm.config import EngineConfig, speculation_of
from asyncllm.engine.cache.changes import CacheChanges, StateChanges
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.policy import Policy
from asyncllm.engine.recording.record import RecordedScheduler
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import BadRequest, EngineDead, ModelError
from asyncllm.executor.memory.limits import wanted_length
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.team.station_messages import Machines
from asyncllm.executor.thread_executor import LAUNCH_PATIENCE, StepWorker, ThreadExecutor
from asyncllm.kernels.cuda_driver import count_gpus
from asyncllm.llm.compile_ahead import CompileAhead
from asyncllm.llm.loaded import Loaded, OwnEngine
from asyncllm.llm.replicas.engine import ReplicatedEngine
from asyncllm.models.loading.hub import resolve_folder
from asyncllm.models.loading.weight_files import check_weights
from asyncllm.models.registry import is_multimodal
from asyncllm.models.sentence_transformers import read_embedding_params
from asyncllm.models.served_spec import find_head, served_spec
from asyncllm.models.spec import ModelSpec, read_sampling_defaults
from asyncllm.system.daemon_thread import run_in_daemon
from asyncllm.system.suggest import did_you_mean
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.model_files import check_tokenizer, read_json
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, calls_writer, choose_formats
from asyncllm.text.structured import StructuredOutput
from asyncllm.text.template_sandbox import read_template
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import SamplingParams
from asyncllm.types.sampling_defaults import SamplingDefaults
from asyncllm.wire.executor import Executor

if TYPE_CHECKING:
    from asyncllm.engine.kv_events import KVEventPublisher

log = logging.getLogger(__name__)
#: Attention kernels that run on GPUs only.
_GPU_ATTENTION: Final = ("triton", "flashinfer")


def name_of(model: str | None) -> str:
    """The model's name for clients: the demo's, the name of its folder, or its hub id."""
    if model is None:
        return demo.NAME
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


async def load(
    config: EngineConfig,
    policy: Policy,
    progress: Callable[[int, int], None] | None,
    machines: Machines | None = None,
    kernels: CompileAhead | None = None,
) -> Loaded:
    """Find and load everything; cancelling stops at the next tensor and leaves nothing behind.

    Args:
        machines: where the ranks are; None: all on this machine.
        kernels: the model's, if they are being compiled already.

    Raises:
        ModelError: the model cannot be found or served; the message says why.
    """
    template_source, folder, text_folder = await _find_files(config)
    spec = await run_in_daemon(served_spec, folder, config)
    num_machines = 1 if machines is None else machines.count
    await run_in_daemon(check_early, config, folder, text_folder, spec, num_machines)
    defaults = _default_params(spec, config)
    default_embedding = read_embedding_params(folder)
    if is_multimodal(spec.architecture):
        log.warning(
            "%s: only its text part is served; requests with images are refused", spec.architecture
        )
    abandoned = threading.Event()

    def report(done: int, total: int) -> None:
        """Called for each tensor, in the executor thread; loading ends when it raises."""
        if abandoned.is_set():
            raise EngineDead("loading was abandoned")
        if progress is not None:
            progress(done, total)

    kv_events = _kv_events(config)
    kernels = kernels or CompileAhead(config, folder)
    bill = StartupBill()
    imported = asyncio.Event()

    async def load_text() -> tuple[Tokenizer, ChatTemplate | None, ChatReader]:
        # Loading the tokenizer needs the GIL all the time, as imports do; reading weights does not.
        await imported.wait()
        return await run_in_daemon(_load_text, text_folder, config, template_source)

    loop, structured = asyncio.get_running_loop(), StructuredOutput()

    def build() -> StepWorker:
        # Imported here, in the executor thread: it brings torch, which takes seconds.
        with bill.phase("import"):
            from asyncllm.executor.leader import build_leader

        loop.call_soon_threadsafe(imported.set)
        return build_leader(config, folder, spec, report, bill, structured, kernels.wait, machines)

    executor, clock = _executor(config, spec, build)
    weights = asyncio.ensure_future(executor.start())
    weights.add_done_callback(lambda _: imported.set())
    text = asyncio.ensure_future(load_text())
    try:
        tokenizer, template, reader = await text
        limits = await asyncio.shield(weights)  # so that loading is told before it is cancelled
        recorded = None
        if config.trace is not None:
            recorded = RecordedScheduler.create(limits, policy)
            recorded.record_to(config.trace)
    except BaseException:
        abandoned.set()
        weights.cancel()
        kernels.stop()
        await asyncio.wait([text, weights])
        for part in (text, weights):
            if not part.cancelled():
                part.exception()
        await executor.close()
        if kv_events is not None:
            kv_events.close()
        raise
    finally:
        kernels.close()
    structured.open(tokenizer, limits.vocab_size, limits.eos_token_ids)
    scheduler = recorded or Scheduler.create(limits, policy)
    if kv_events is not None:
        _publish(scheduler.cache, kv_events)
    lookup = speculation_of(config)
    if lookup is not None and not limits.max_draft_tokens:
        log.warning("on a GPU, nothing is drafted for models with recurrent layers yet")
    engine = OwnEngine(limits, executor, scheduler, tokenizer, structured, lookup, clock)
    engine.start()
    executor.on_death(engine.give_up)
    # A full collection visits everything loaded, which takes 0.2 s; it leaves out what is frozen,
    # until closing. The program's garbage goes first; ``serve`` has none, and collections are off.
    if gc.isenabled():
        gc.collect()
    gc.freeze()
    text_parts = tokenizer, template, reader
    return Loaded(spec, *text_parts, defaults, default_embedding, engine, recorded, kv_events, bill)


def _kv_events(config: EngineConfig) -> KVEventPublisher | None:
    if config.kv_events is None:
        return None
    try:
        from asyncllm.engine.kv_events import KVEventPublisher
    except ImportError as error:
        raise ModelError(
            f"kv_events needs pyzmq ({error}): pip install 'asyncllm-server[kv-events]'",
            param="kv_events",
        ) from None
    return KVEventPublisher(config.kv_events, config.kv_events_topic, config.page_size)


def _publish(cache: KVCacheManager, kv_events: KVEventPublisher) -> None:
    """Publish the cache's changes, in a turn of the loop of their own: steps come first."""
    loop = asyncio.get_running_loop()

    def notify() -> None:
        loop.call_soon(lambda: kv_events.publish(changes.take()))

    changes = (StateChanges if cache.states.num_slots else CacheChanges)(notify)
    cache.report_to(changes)


async def load_replicas(config: EngineConfig) -> Loaded:
    """Replicas in processes of their own; texts become tokens here. Raises like ``load``."""
    template_source, folder, text_folder = await _find_files(config)
    spec = await run_in_daemon(served_spec, folder, config)
    await run_in_daemon(check_early, config, folder, text_folder, spec)
    parts = _default_params(spec, config), read_embedding_params(folder)
    text = await run_in_daemon(_load_text, text_folder, config, template_source)
    engine = ReplicatedEngine(config)
    bill = StartupBill()
    try:
        with bill.phase("replicas"):
            await engine.start()
    except BaseException:
        text[0].close()
        raise
    # Each replica publishes its own KV events.
    return Loaded(spec, *text, *parts, engine, None, None, bill)


async def _find_files(config: EngineConfig) -> tuple[str | None, Path, Path]:
    """The chat template that was given, if any, and the folders of the model and its tokenizer."""
    template_source = None
    if config.chat_template is not None:  # first: it may be wrong, and a download takes long
        template_source = await asyncio.to_thread(read_template, config.chat_template)
    where = config.download_dir
    await run_in_daemon(find_head, config)  # it is much smaller than the model
    folder = await run_in_daemon(resolve_folder, config.model, config.revision, where)
    text_folder = folder
    if config.tokenizer is not None:
        text_folder = await run_in_daemon(resolve_folder, config.tokenizer, None, where)
    return template_source, folder, text_folder


def _executor(
    config: EngineConfig, spec: ModelSpec, build: Callable[[], StepWorker]
) -> tuple[Executor, Callable[[], float]]:
    """The executor, and the clock of its times."""
    if config.device != "sim":
        launch_seconds = LAUNCH_PATIENCE if config.gpu is not None else 0.0
        return ThreadExecutor(build, launch_seconds), time.perf_counter
    # Imported here: few need it.
    from asyncllm.executor.sim import virtual_time
    from asyncllm.executor.sim.executor import build_sim

    clock = virtual_time.clock_of(asyncio.get_running_loop())
    return build_sim(config, spec, clock), clock


def _default_params(spec: ModelSpec, config: EngineConfig) -> SamplingParams:
    """What requests leave out: the values of a generation_config.json, and those over them."""
    recommended, source = spec.sampling, config.generation_config
    if source != "auto":
        elsewhere = source != "none"
        recommended = read_sampling_defaults(Path(source)) if elsewhere else SamplingDefaults()
    try:
        return recommended.params(config.override_generation_config or {})
    except BadRequest as error:
        raise ModelError(f"generation_config.json: {error.message}") from None


def _load_text(
    folder: Path, config: EngineConfig, chat_template: str | None
) -> tuple[Tokenizer, ChatTemplate | None, ChatReader]:
    tokenizer = Tokenizer.from_folder(folder)
    variables = config.default_chat_template_kwargs
    template = ChatTemplate.from_folder(folder, chat_template, variables)
    if template is not None and template.cannot:
        log.info("the chat template does not take %s", template.cannot)
    formats = choose_formats(
        template,
        read_json(folder / "config.json").get("model_type"),
        tools=config.tool_parser,
        reasoning=config.reasoning_parser,
    )
    if template is not None:
        template = template.with_calls(calls_writer(formats))
    return tokenizer, template, ChatReader(formats, tokenizer)


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
            if spec.eagle3 is not None:
                check_weights(spec.eagle3.folder)
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
