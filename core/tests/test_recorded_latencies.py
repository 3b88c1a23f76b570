"""Every profile of the catalogue, and fits to measured iterations, by their figures when they were recorded.

Plans and placements follow from these figures. Whoever means to change one records them anew, and reviews the table:

    .venv/bin/python core/tests/test_recorded_latencies.py
"""

import csv
import itertools
import math
import random
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from sluice_core.latency.interface import UnknownModelError
from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.kernel_fits import load_kernels
from sluice_core.latency.known_gpus import GPUS
from sluice_core.latency.known_models import MODELS
from sluice_core.latency.kv_capacity import compute_kv_bytes_per_token, compute_kv_capacity_tokens
from sluice_core.latency.measured_profiles import Assumptions, ProfileKind, build_kernel_profile, load_model_on_gpu
from sluice_core.latency.model_architecture import Architecture
from sluice_core.latency.online_latency_model import OnlineLatencyModel
from sluice_core.latency.scaled_latency_model import ScaledLatencyModel
from sluice_core.latency.transfer import LINKS
from sluice_core.records import IterationShape

RECORDED = Path(__file__).with_name("recorded_latencies.csv")
SHAPES = [
    IterationShape(num_decodes=1, decode_context_tokens=700),
    IterationShape(num_decodes=63, decode_context_tokens=90_000),
    IterationShape(num_decodes=260, decode_context_tokens=400_000),
    IterationShape(prefill_tokens=5, num_chunks=1, attention_work=12.5),
    IterationShape(prefill_tokens=2048, num_chunks=3, attention_work=3e6),
    IterationShape(prefill_tokens=20_000, num_chunks=1, attention_work=2e8),
    IterationShape(prefill_tokens=500, num_chunks=2, attention_work=4e5, num_decodes=40, decode_context_tokens=50_000),
]
# Tokens, attention work, prompts, room, decodes, context.
QUEUES = [
    (900, 4e5, 2, 256, 0, 0),
    (1024, 5e5, 1, 512, 30, 40_000),
    (1, 0.5, 1, 64, 300, 9_000),
    (5000, 1e7, 7, 5000, 5, 99),
]
OTHER = Assumptions(
    host_iteration_s=0.001,
    host_sequence_s=2e-5,
    layer_s=3e-5,
    memory_efficiency=0.6,
    lm_head_s=0.3e-3,
    reduce_element_bytes=2,
)
# Sizes between the measured ones and beyond them.
ODD = {
    "odd heads": Architecture(
        num_layers=10,
        num_heads=24,
        num_kv_heads=6,
        head_size=128,
        hidden_size=3000,
        intermediate_size=9000,
        vocabulary_tokens=50_000,
        has_tied_embeddings=True,
    ),
    "small heads": Architecture(
        num_layers=4,
        num_heads=16,
        num_kv_heads=16,
        head_size=80,
        hidden_size=1280,
        intermediate_size=5120,
        vocabulary_tokens=32_000,
    ),
    "beyond": Architecture(
        num_layers=20,
        num_heads=192,
        num_kv_heads=96,
        head_size=128,
        hidden_size=24_576,
        intermediate_size=90_000,
        vocabulary_tokens=200_000,
    ),
}


def list_figures(model):
    """Lists what a latency model says of shapes and queues."""
    figures = [model.estimate_shape_s(shape) for shape in SHAPES]
    for tokens, work, prompts, room, decodes, context in QUEUES:
        figures.append(
            model.estimate_prefill_s(
                tokens=tokens,
                attention_work=work,
                num_prompts=prompts,
                room_tokens=room,
                num_decodes=decodes,
                decode_context_tokens=context,
            )
        )
        figures += astuple(model.compute_prefill_coefficients(decodes, context, room))
    return [*figures, model.num_observations, model.relative_error]


def describe_catalogue():
    """Describes every model on every GPU, by every kind of profile that there is of it."""
    rows = {}
    for model, gpu, kind, tensor_parallel in itertools.product(MODELS, GPUS, (None, *ProfileKind), (1, 2, 8)):
        try:
            found = load_model_on_gpu(model, gpu, tensor_parallel, kind=kind)
        except UnknownModelError:
            continue
        sizes = [found.weight_bytes, found.kv_bytes_per_token, found.kv_capacity_tokens]
        rows[f"{model} {tensor_parallel} {gpu} {kind or 'usual'}"] = [*sizes, *list_figures(found.profile)]
    assumed = load_model_on_gpu("qwen2.5-14b", "l40s-48g", 2, assumptions=OTHER)
    rows["qwen2.5-14b 2 l40s-48g, otherwise assumed"] = [0, 0, 0, *list_figures(assumed.profile)]
    for (name, shape), gpu in itertools.product(ODD.items(), ("a100-80g", "l40s-48g")):
        for tensor_parallel in (1, 2, 8):
            kernels = load_kernels(gpu)
            profile = build_kernel_profile(shape, kernels, tensor_parallel)
            try:
                capacity = compute_kv_capacity_tokens(shape, kernels.memory_bytes, tensor_parallel)
            except UnknownModelError:
                capacity = 0
            sizes = [shape.compute_weight_bytes(), compute_kv_bytes_per_token(shape, tensor_parallel), capacity]
            rows[f"{name} {tensor_parallel} {gpu}"] = [*sizes, *list_figures(profile)]
    return rows


def describe_fits():
    """Describes models that learn from drawn iterations of engines: plain, noisy, with stalls, one that changes."""
    rows = {}
    truth = load_model_on_gpu("llama-3-8b", "h100-80g", 1).profile
    for name, prior in (("no profile", None), ("a profile", load_model_on_gpu("qwen2.5-14b", "a100-80g", 1).profile)):
        for noise, stalls, change in ((0.0, 0.0, 1.0), (0.1, 0.0, 1.0), (0.05, 0.05, 1.0), (0.02, 0.0, 3.0)):
            rng = random.Random(f"{noise} {stalls} {change}")
            model = OnlineLatencyModel(prior)
            assert model.num_observations == 0
            for step in range(260):
                decodes, chunk = rng.randrange(60), rng.choice((0, 0, 128, 512, 700))
                shape = IterationShape(
                    prefill_tokens=chunk,
                    num_chunks=1 + chunk // 600 if chunk else 0,
                    attention_work=chunk * rng.uniform(0, 3000.0),
                    num_decodes=decodes,
                    decode_context_tokens=decodes * rng.randrange(100, 4000),
                )
                duration_s = max(1e-4, truth.estimate_shape_s(shape)) * math.exp(rng.gauss(0.0, noise))
                duration_s *= (change if step > 130 else 1.0) * (20.0 if rng.random() < stalls else 1.0)
                model.observe(shape, duration_s)
                if step in {0, 20, 100, 140, 259}:
                    key = f"fit to {name}, noise {noise}, stalls {stalls}, change {change}, after {step}"
                    rows[key] = [*model.coefficients, 0, *list_figures(model)][1:]
            before = model.coefficients
            for absurd in (0.0, -1.0, math.inf, math.nan):
                model.observe(SHAPES[0], absurd)
            assert (model.coefficients, model.num_observations) == (before, 260)
    profile = before.make_profile()
    rows["the last fit as a profile"] = [0, 0, 0, *list_figures(profile)]
    rows["the same, scaled"] = [0, 0, 0, *list_figures(ScaledLatencyModel(profile, 1.3))]
    return rows


def describe_links():
    """Describes transfers, one after the other over one link."""
    rows = {}
    for name, speed in LINKS.items():
        free_at_s, figures = 0.0, []
        for now, num_bytes in ((0.0, 1e6), (0.0, 5e9), (1.0, 0.0), (50.0, 2e8)):
            free_at_s, arrives_at_s = speed.schedule(now, free_at_s, num_bytes)
            figures += [free_at_s, arrives_at_s]
        rows[f"link {name}"] = figures
    return rows


def describe():
    return {**describe_catalogue(), **describe_fits(), **describe_links()}


def read_recorded():
    with RECORDED.open(newline="") as file:
        return {name: [float(value) for value in values] for name, *values in csv.reader(file)}


RECORDS = read_recorded() if RECORDED.exists() else {}


@pytest.mark.parametrize("kind", [describe_catalogue, describe_fits, describe_links])
def test_figures_are_as_they_were_recorded(kind):
    found = kind()
    assert set(found) <= set(RECORDS)
    wrong = {
        name: [
            (index, value)
            for index, value in enumerate(values)
            if value != pytest.approx(RECORDS[name][index], rel=1e-6)
        ]
        for name, values in found.items()
    }
    assert {name: values for name, values in wrong.items() if values} == {}
    assert {name: len(values) for name, values in found.items()} == {name: len(RECORDS[name]) for name in found}


def test_all_that_was_recorded_is_there():
    assert set(describe_links()) == {name for name in RECORDS if name.startswith("link ")}
    assert len(RECORDS) > 100


def test_nothing_to_compute_takes_no_time_and_no_room_takes_for_ever():
    fit = OnlineLatencyModel()
    for model in (IterationProfile(linear_s=(0.0, 0.01), slope_s=1e-4), fit, ScaledLatencyModel(fit, 2.0)):
        queue = {"attention_work": 9.0, "num_prompts": 1, "num_decodes": 3, "decode_context_tokens": 9}
        assert model.estimate_prefill_s(tokens=0, room_tokens=0, **queue) == 0.0
        assert model.estimate_prefill_s(tokens=1, room_tokens=0, **queue) == math.inf
        assert model.estimate_prefill_s(tokens=1, room_tokens=1, **queue) < math.inf


def write():
    """Records all figures."""
    with RECORDED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for name, values in describe().items():
            writer.writerow([name, *(f"{value:.8g}" for value in values)])


if __name__ == "__main__":
    write()
    sys.stdout.write(f"figures are in {RECORDED}\n")
