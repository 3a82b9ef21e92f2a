"""Every option that is a number has a range, and a value outside it is refused by name."""

from __future__ import annotations

import math
from typing import Any, Final, get_type_hints

import msgspec
import pytest

from asyncllm.__main__ import main
from asyncllm.config import MIN_CACHE, EngineConfig
from asyncllm.config.option_names import option_of
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.types import SamplingParams
from asyncllm.types.validate import Range, type_of

STRUCTS: Final[tuple[type[msgspec.Struct], ...]] = (EngineConfig, ServerConfig, RayConfig)


def numbers(*structs: type[msgspec.Struct]) -> list[tuple[type[msgspec.Struct], str, type]]:
    """The numeric options: the struct, the field and int or float."""
    return [
        (struct, name, kind)
        for struct in structs
        for name, hint in get_type_hints(struct, include_extras=True).items()
        if (kind := type_of(hint)[0]) in (int, float)
    ]


def range_of(struct: type[msgspec.Struct], name: str) -> Range:
    extras = type_of(get_type_hints(struct, include_extras=True)[name])[1]
    [found] = [extra for extra in extras if isinstance(extra, Range)]
    return found


@pytest.mark.parametrize(("struct", "name", "kind"), numbers(*STRUCTS))
def test_a_number_out_of_its_range_is_refused_by_name(
    struct: type[msgspec.Struct], name: str, kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = range_of(struct, name)
    wrong: list[Any] = [kind(allowed.least - 1), kind(allowed.most + 1)]
    wrong += [-math.inf, math.inf, math.nan] if kind is float else []
    wrong += [kind(allowed.least)] if allowed.is_open else []
    for value in wrong:
        with pytest.raises(BadRequest, match=f"^{name} must be .*, not ") as error:
            struct(**{name: value}, **({"ray": True} if struct is RayConfig else {}))
        assert error.value.param == name
    with pytest.raises(SystemExit):
        main(
            ["serve", f"{option_of(name)}={wrong[0]}", *(["--ray"] if struct is RayConfig else [])]
        )
    assert f"error: {option_of(name)} must be " in capsys.readouterr().err


@pytest.mark.parametrize(("struct", "name", "kind"), numbers(SamplingParams))
def test_so_is_one_of_sampling(struct: type[SamplingParams], name: str, kind: type) -> None:
    for value in (kind(-(2**70)), kind(2**70)):
        with pytest.raises(BadRequest) as error:
            struct(**{name: value})
        assert error.value.param == name


@pytest.mark.parametrize(
    ("given", "least"), [({}, MIN_CACHE), ({"page_size": 16}, MIN_CACHE), ({"page_size": 256}, 256)]
)
def test_the_kv_cache_holds_a_chat_and_a_page(given: dict[str, Any], least: int) -> None:
    for tokens in (10, least - 1):
        with pytest.raises(BadRequest, match=r"^kv_cache_tokens must be at least") as error:
            EngineConfig(kv_cache_tokens=tokens, **given)
        assert error.value.param == "kv_cache_tokens"
    assert EngineConfig(kv_cache_tokens=least, **given).kv_cache_tokens == least


@pytest.mark.parametrize(
    ("struct", "given", "wrong"),
    [
        (EngineConfig, {"device": "cuda:"}, "be auto, cpu, cuda, cuda:N or sim, not 'cuda:'"),
        (
            EngineConfig,
            {"sim_profile": "h200-0x6b"},
            "be auto, h200-8b, h200-0.6b, h200-30b-a3b or a .json file, not 'h200-0x6b'",
        ),
        (EngineConfig, {"default_chat_template_kwargs": {"tools": []}}, "not contain tools"),
        (ServerConfig, {"served_model_name": ("a", "")}, "not be empty"),
        (ServerConfig, {"api_key": ("",)}, "not be empty"),
        (ServerConfig, {"admin_key": ""}, "not be empty"),
        (
            ServerConfig,
            {"cors_origin": ("*", "https://x.org/")},
            "be like https://example.org (lower case, ASCII, no default port) or *, "
            "not 'https://x.org/'",
        ),
        (
            ServerConfig,
            {"allowed_hosts": (".x.org", "*x")},
            "be like llm.example.org, .example.org or *, not '*x'",
        ),
        (ServerConfig, {"otlp_endpoint": "x:1"}, "be like http://localhost:4318, not 'x:1'"),
    ],
)
def test_so_is_a_text_of_another_form(
    struct: type[msgspec.Struct], given: dict[str, Any], wrong: str
) -> None:
    [name] = given
    with pytest.raises(BadRequest) as error:
        struct(**given)
    assert (error.value.message, error.value.param) == (f"{name} must {wrong}", name)
    fine = {"sim_profile": "x.json", "admin_key": "k", "cors_origin": "*", "allowed_hosts": "*"}
    if name in fine:
        value = fine[name]
        struct(**{name: (value,) if isinstance(given[name], tuple) else value})
