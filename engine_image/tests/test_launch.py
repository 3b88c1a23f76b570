"""How an engine is started: vLLM's arguments, ports that are taken, the fork that becomes the EngineCore."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from engine_ports import PORTS
from pydantic import BaseModel, Field, field_validator
from quiet_imports import import_quietly

from sluice_engine import core_refusal
from sluice_engine.errors import ModelRefusedError, SettingsError, StartError
from sluice_engine.settings import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = {
    "engine_id": "e",
    "host": "127.0.0.1",
    "port": 1,
    "metrics_port": 2,
    "kv_host": "127.0.0.1",
    "kv_port": 3,
    "model": "org/model",
    "max_batch_tokens": 512,
}
# What each engine is told, whatever it computes on.
COMMON = {
    "model": "org/model",
    "revision": None,
    "tensor_parallel_size": 1,
    "max_model_len": None,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 256,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256",
    "scheduling_policy": "priority",
}
SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceScheduler"
ASYNC_SCHEDULER = "sluice_engine.scheduling.scheduler.SluiceAsyncScheduler"
EXECUTOR = "sluice_engine.startup.in_process_executor.InProcessExecutor"


@pytest.fixture(scope="module")
def launch() -> Any:
    return import_quietly("sluice_engine.startup.launch")


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    return import_quietly("sluice_engine.startup.vllm_config")


def make_settings(**fields: Any) -> EngineSettings:
    return EngineSettings(**{**FIELDS, **fields})


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], Any, Any, Any]:
    """Takes vLLM's own records out of the arguments."""
    arguments = dict(arguments)
    records = [arguments.pop(f"{name}_config") for name in ("kv_transfer", "kv_events", "structured_outputs")]
    return arguments, *records


def test_an_engine_on_the_cpu_computes_in_its_own_process(vllm_config) -> None:
    plain, transfer, events, structured = split(vllm_config.vllm_arguments(make_settings(), 0xABC))
    assert plain == {
        **COMMON,
        "dtype": "float32",
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "scheduler_cls": SCHEDULER,
        "distributed_executor_backend": EXECUTOR,
    }
    assert (transfer.engine_id, transfer.kv_buffer_device, transfer.kv_role) == ("e-abc", "cpu", "kv_both")
    assert transfer.kv_connector_extra_config == {
        "kv_lease_duration": 30,
        "backends": ["UCX"],
        "sluice_progress_delay_us": 100,
    }
    assert (events.enable_kv_cache_events, events.publisher) == (True, "null")
    assert structured.backend == "guidance"


def test_what_the_user_asks_for_is_in_the_arguments(vllm_config) -> None:
    settings = make_settings(
        dtype="bfloat16",
        block_size=64,
        kv_cache_bytes=99,
        revision="r",
        tensor_parallel_size=2,
        max_model_len=77,
        max_num_seqs=5,
        kv_poll_us=7,
        kv_backend="LIBFABRIC",
    )
    plain, transfer, _, _ = split(vllm_config.vllm_arguments(settings, 1))
    asked = {
        "dtype": "bfloat16",
        "block_size": 64,
        "kv_cache_memory_bytes": 99,
        "revision": "r",
        "tensor_parallel_size": 2,
        "max_model_len": 77,
        "max_num_seqs": 5,
    }
    assert plain.items() >= asked.items()
    assert transfer.kv_connector_extra_config["backends"] == ["LIBFABRIC"]
    assert transfer.kv_connector_extra_config["sluice_progress_delay_us"] == 7


def test_an_engine_on_a_gpu_keeps_vllms_defaults(vllm_config, monkeypatch) -> None:
    monkeypatch.setattr(vllm_config, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    plain, transfer, _, _ = split(vllm_config.vllm_arguments(make_settings(), 1))
    assert plain == {**COMMON, "scheduler_cls": ASYNC_SCHEDULER}
    assert transfer.kv_buffer_device == "cuda"
    assert not vllm_config.is_forked(make_settings())


def test_an_emulated_gpu_is_scheduled_as_one_and_loads_nothing(vllm_config, tiny_model: Path) -> None:
    settings = make_settings(model=str(tiny_model), emulation={"base_s": 0.03, "chunk_s": 0.05})
    plain, transfer, _, _ = split(vllm_config.vllm_arguments(settings, 1))
    emulation = plain.pop("additional_config")
    assert plain == {
        **COMMON,
        "model": str(tiny_model),
        "block_size": 16,
        "scheduler_cls": ASYNC_SCHEDULER,
        "enforce_eager": True,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "async_scheduling": True,
        "distributed_executor_backend": "sluice_engine.emulation.emulated_executor.EmulatedExecutor",
    }
    assert emulation == {vllm_config.emulated_gpu_profile.CONFIG_KEY: settings.emulation.model_dump()}
    assert (transfer.kv_connector, transfer.kv_connector_module_path, transfer.kv_connector_extra_config) == (
        "EmulatedConnector",
        "sluice_engine.emulation.emulated_kv_transfer",
        {"host": "127.0.0.1", "port": 3},
    )
    assert vllm_config.is_forked(settings)


def test_our_arguments_win_over_the_users_and_these_over_vllms(vllm_config, tiny_model: Path) -> None:
    own = {"model": str(tiny_model), "max_num_seqs": 5, "enforce_eager": True}
    merged = vllm_config.merge_arguments(("--max-num-seqs", "9", "--seed", "7"), own)
    assert (merged.model, merged.max_num_seqs, merged.enforce_eager, merged.seed) == (str(tiny_model), 5, True, 7)
    assert vllm_config.merge_arguments((), own).max_num_seqs == 5


@pytest.mark.parametrize("option", ["port", "metrics_port", "kv_port"])
def test_a_taken_port_is_named_with_its_option(launch, option) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        free = {name: next(PORTS) for name in ("port", "metrics_port", "kv_port")}
        settings = make_settings(**{**free, option: number})
        name = f"--{option.replace('_', '-')}"
        with pytest.raises(StartError, match=rf"^{name}: cannot listen on 127\.0\.0\.1:{number}: "):
            launch.check_ports(settings)
    launch.check_ports(make_settings(**free))


def test_a_fork_becomes_a_core_that_its_parent_alone_ends(launch, monkeypatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(launch, "die_with_parent", lambda: made.append("dies with its parent"))
    monkeypatch.setattr(os, "setpgid", lambda *arguments: made.append(arguments))
    launch.become_core()
    default = signal.SIG_DFL
    assert made == [(signal.SIGTERM, default), (signal.SIGINT, default), "dies with its parent", (0, 0)]


def test_the_core_is_started_by_vllm_and_a_failure_is_said(launch, monkeypatch) -> None:
    made: list[Any] = []
    answers: list[Any] = ["a client", RuntimeError("no room"), TimeoutError("late"), OSError("no file"), KeyError("?")]

    class Client:
        @staticmethod
        def make_async_mp_client(*arguments: Any, **options: Any) -> Any:
            made.append((arguments, options))
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: made.append(after_in_child))
    monkeypatch.setattr(launch, "EngineCoreClient", Client)
    monkeypatch.setattr(launch, "Executor", SimpleNamespace(get_class=lambda config: f"executor of {config}"))
    assert launch.start_core("config") == "a client"
    assert made == [launch.become_core, (("config", "executor of config"), {"log_stats": False})]
    for reason in ("no room", "late", "no file"):
        with pytest.raises(StartError, match=f"the EngineCore did not start: {reason}"):
            launch.start_core("config")
    with pytest.raises(KeyError):
        launch.start_core("config")


def test_a_core_that_refuses_its_model_says_why(launch, monkeypatch, tmp_path) -> None:
    class Client:
        @staticmethod
        def make_async_mp_client(*_arguments: Any, **_options: Any) -> None:
            with pytest.raises(errors[0]), core_refusal.reported():
                raise errors[0]("no attention")
            raise RuntimeError("see above")

    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: None)
    monkeypatch.setattr(launch, "EngineCoreClient", Client)
    monkeypatch.setattr(launch, "Executor", SimpleNamespace(get_class=lambda config: config))
    monkeypatch.setenv(core_refusal.VARIABLE, "")
    core_refusal.prepare(tmp_path)
    errors: list[type[Exception]] = [ModelRefusedError, ValueError, NotImplementedError, RuntimeError]
    while len(errors) > 1:
        with pytest.raises(ModelRefusedError, match=r"^no attention$"):
            launch.start_core("config")
        (tmp_path / "core-refusal").unlink()
        del errors[0]
    # What may be otherwise the next time is not noted.
    with pytest.raises(StartError, match="did not start: see above"):
        launch.start_core("config")


def test_a_tokenizer_is_loaded_where_there_is_one(launch, monkeypatch) -> None:
    monkeypatch.setattr(launch, "cached_tokenizer_from_config", lambda model: f"tokenizer of {model.name}")
    models = [SimpleNamespace(skip_tokenizer_init=skips, name="m") for skips in (True, False)]
    found = [launch.load_tokenizer(SimpleNamespace(model_config=model)) for model in models]
    assert found == [None, "tokenizer of m"]


def refuse_configuration(vllm_config: Any, monkeypatch: pytest.MonkeyPatch, refuse: Any) -> None:
    monkeypatch.setattr(vllm_config, "set_environment", lambda _settings: None)
    monkeypatch.setattr(vllm_config.model_classes, "register_classes", lambda _model: None)
    arguments = SimpleNamespace(create_engine_config=refuse)
    monkeypatch.setattr(vllm_config, "merge_arguments", lambda _user, _own: arguments)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"number": 300}, "Input should be less than or equal to 200"),
        ({"number": 13}, "no 13, which is unlucky in this building and in the next"),
    ],
    ids=["a limit", "a rule"],
)
def test_a_configuration_that_vllm_refuses_is_said_in_one_line(vllm_config, monkeypatch, tmp_path, field, said) -> None:
    class Config(BaseModel):
        number: int = Field(le=200)

        @field_validator("number")
        @classmethod
        def refuse(cls, number: int) -> int:
            if number == 13:
                raise ValueError("no 13, which is unlucky in this building\n  and in the next")
            return number

    refuse_configuration(vllm_config, monkeypatch, lambda: Config(**field))
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelRefusedError, match=f"^vLLM refuses the configuration: {said}$"):
        vllm_config.make_vllm_config(make_settings(model=str(tmp_path)), 1)


def test_a_refusal_is_cut_where_a_termination_message_could_not_hold_it(vllm_config) -> None:
    said = vllm_config.describe_refusal(ValueError("known are " + "X " * 5000))
    assert len(said) <= 500
    assert said.endswith("X ...")


def test_a_model_of_the_hub_is_not_refused_for_good_nor_one_that_cannot_be_read(vllm_config, monkeypatch) -> None:
    def fail() -> None:
        raise errors.pop()

    errors: list[Exception] = [OSError("no route"), ValueError("no such model, or no network")]
    refuse_configuration(vllm_config, monkeypatch, fail)
    with pytest.raises(StartError, match="vLLM refuses the configuration: no such model"):
        vllm_config.make_vllm_config(make_settings(), 1)
    with pytest.raises(StartError, match="vLLM cannot read the model: no route"):
        vllm_config.make_vllm_config(make_settings(), 1)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"is_attention_free": True}, "has no attention"),
        ({"is_hybrid": True}, "has layers without attention"),
        ({"is_encoder_decoder": True, "attention_chunk_size": 64}, "has an encoder and has attention that is local to"),
        ({"runner_type": "pooling"}, "generates no tokens"),
    ],
    ids=["Mamba", "Jamba", "two reasons", "BERT"],
)
def test_a_model_is_refused_by_what_vllm_knows_of_its_class(vllm_config, facts, reason) -> None:
    supported = dict.fromkeys(vllm_config.UNSUPPORTED_MODELS) | {"runner_type": "generate", "architectures": ["A"]}
    vllm_config.check_model_config(SimpleNamespace(**supported))
    with pytest.raises(ModelRefusedError, match=rf"^the model \(A\) {reason}.*; models with full attention"):
        vllm_config.check_model_config(SimpleNamespace(**supported | facts))


def test_an_argument_that_vllm_does_not_know_is_said_without_pages_of_usage(vllm_config, capsys) -> None:
    with pytest.raises(SettingsError, match=r"^arguments after --: unrecognized arguments: --what$"):
        vllm_config.merge_arguments(("--what",), {})
    assert capsys.readouterr().err == ""


def test_a_class_that_cannot_be_imported_is_left_to_vllm_and_the_others_are_registered(
    vllm_config, monkeypatch, tmp_path
) -> None:
    def refuse() -> None:
        raise ImportError("no kernels")

    registered: list[tuple[str, str]] = []
    classes = vllm_config.model_classes
    known = {"Broken": SimpleNamespace(load_model_cls=refuse), "Llama": SimpleNamespace(load_model_cls=lambda: "class")}
    registry = SimpleNamespace(models=known, register_model=lambda *pair: registered.append(pair))
    monkeypatch.setattr(classes, "ModelRegistry", registry)
    (tmp_path / "config.json").write_text('{"architectures": ["Broken", "Unheard", 7, "Llama"]}')
    assert classes.register_classes(str(tmp_path)) == ["Llama"]
    assert registered == [("Llama", "class")]
    for text in ("{", "[]", '{"architectures": "Llama"}'):
        (tmp_path / "config.json").write_text(text)
        assert classes.register_classes(str(tmp_path)) == []
    assert classes.register_classes("org/model") == []


def test_an_engine_on_the_cpu_compiles_nothing(monkeypatch) -> None:
    """vLLM compiles what ranks logprobs by itself: seconds of the first iteration, and a compiler that images lack."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: PLC0415

        from sluice_engine.startup.in_process_executor import InProcessExecutor, UniProcExecutor  # noqa: PLC0415

    compiled: list[Any] = []
    run = torch.compile(lambda value: value + 1, backend=lambda graph, _inputs: compiled.append(graph) or graph.forward)
    monkeypatch.setattr(UniProcExecutor, "_init_executor", lambda _self: compiled.append("a worker"))
    try:
        InProcessExecutor._init_executor(object.__new__(InProcessExecutor))
        assert run(torch.ones(1)).tolist() == [2.0]
    finally:
        torch.compiler.set_stance("default")
    assert compiled == ["a worker"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "10.0.0.1"])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_environment_is_that_of_the_machine(vllm_config, monkeypatch, host, is_cpu, tmp_path) -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "40"}
    monkeypatch.setattr(vllm_config.os, "environ", environment)
    monkeypatch.setattr(vllm_config, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    vllm_config.set_environment(make_settings(kv_host=host, model=str(tmp_path)))
    assert ("UCX_NET_DEVICES" in environment) == (host != "10.0.0.1")
    assert ("OMP_NUM_THREADS" in environment) == is_cpu
    assert ("VLLM_CPU_KVCACHE_SPACE" in environment) != is_cpu
    assert environment.get("VLLM_CPU_OMP_THREADS_BIND") == ("nobind" if is_cpu else None)
    # A directory's model is not looked for on the hub.
    assert environment["HF_HUB_OFFLINE"] == "1"


@pytest.fixture(scope="module")
def output_replay() -> Any:
    return import_quietly("sluice_engine.kv_transfer.output_replay")


def make_state(output_replay: Any, output: list[int], extras: dict[str, Any] | None, generator: Any) -> Any:
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415

    parameters = SamplingParams(seed=5)
    parameters.extra_args = extras
    return output_replay.ResumedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=parameters,
        generator=generator,
        block_ids=([1],),
        num_computed_tokens=0,
        output_token_ids=output,
    )


def test_a_runner_knows_the_tokens_that_were_made_elsewhere(output_replay) -> None:
    brought = {"sluice": {"output_token_ids": [7, 8]}}
    assert make_state(output_replay, [], brought, None).output_token_ids == [7, 8]
    assert make_state(output_replay, [9], brought, None).output_token_ids == [9]
    assert make_state(output_replay, [], None, None).output_token_ids == []
    assert make_state(output_replay, [], {}, None).generator is None


def test_a_gpus_generator_and_a_request_that_samples_nothing_stay_as_they_are(output_replay) -> None:
    generator = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    assert make_state(output_replay, [], None, generator).generator is generator
    state = output_replay.ResumedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=([1],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    assert state.output_token_ids == []


def test_a_seeded_request_draws_on_where_it_was(output_replay) -> None:
    import torch  # noqa: PLC0415

    def draw(generator: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))

    whole = torch.Generator(device="cpu").manual_seed(5)
    draws = [draw(whole) for _ in range(4)]
    state = make_state(output_replay, [], {"sluice": {"output_token_ids": [7, 8]}}, torch.Generator(device="cpu"))
    generator = state.generator
    assert [draw(generator), draw(generator)] == draws[2:]
    # A sample that is discarded is drawn again.
    assert generator.get_offset() == 0
    generator.set_offset(4)
    assert draw(generator) == draws[2]
    fresh = make_state(output_replay, [], None, torch.Generator(device="cpu"))
    assert [draw(fresh.generator) for _ in range(4)] == draws


async def test_a_drain_ends_with_the_engine_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ever come to be drained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sluice_engine import lifecycle  # noqa: PLC0415
    looks: list[str] = []

    class Server:
        num_requests = 1

        @property
        def is_drained(self) -> bool:
            looks.append("at the server")
            return len(looks) > 9

        async def drain(self) -> None:
            pump.set_exception(RuntimeError("the EngineCore is dead"))

    pump: Any = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(lifecycle, "DRAIN_POLL_S", 0.0)
    await lifecycle.wait_for_drain(Server(), {pump}, 600.0)  # type: ignore[arg-type]
    assert pump.exception() is not None
    assert len(looks) == 1
