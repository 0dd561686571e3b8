"""Recipes, files and overrides compose into one config; every shipped recipe is valid.

Every setting of a training does something, and no run goes on under another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shards.errors import UsageError
from shards.settings import from_mapping, read_toml, resolve, to_mapping
from tests.changed_settings import changed
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.run_cases import metrics_without_timing, run_files, tiny_run, write_store
from trainer.students.configuration import StudentSettings, grouped
from trainer.training.loop import train
from trainer.training.resume import GONE, operational_fields, require_same_run
from trainer.training.settings import RECIPES, OptimizationConfig, RunConfig, compose_run, read_recipe

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
STUDENTS = sorted(path for path in CONFIGS.glob("*.toml") if "student" in read_toml(path))


@pytest.mark.parametrize("path", [*RECIPES.glob("*.toml"), *STUDENTS], ids=lambda path: path.stem)
def test_what_is_shipped(path: Path) -> None:
    compose_run([read_toml(path), {"model": {"conditioning": "gumbel"}}])


def test_configs_of_the_paper() -> None:
    """The small recipe is what a training is where nothing else is said."""
    config = compose_run([read_recipe("small")])
    assert (config.training.num_steps, config.training.global_batch_size) == (1_000_000, 512)
    assert (config.model, config.optimization) == (StudentSettings(), OptimizationConfig())
    for corpus in ("owt", "lm1b"):
        names = (f"{corpus}-bd3lm-pretrain", f"{corpus}-bd3lm")
        parts = [compose_run([read_toml(CONFIGS / f"{name}.toml")]) for name in names]
        assert [part.training.num_steps for part in parts] == [850_000, 150_000]
        assert [part.model.block_size for part in parts] == [None, 4]
    config = compose_run([read_toml(CONFIGS / "lm1b-mdlm-medium.toml")])
    assert (config.model.num_layers, config.model.hidden_size) == (24, 1024)
    assert (config.training.num_steps, config.training.global_batch_size) == (1_000_000, 512)
    for kind in ("token", "sequence"):
        assert read_toml(CONFIGS / f"{kind}-kd.toml")["model"]["kd"]["kind"] == kind
    assert "gdistill-extract --mode sequential" in (CONFIGS / "sequence-kd.toml").read_text()


def test_later_sources_win_and_an_architecture_can_be_refined() -> None:
    recipe = {"architecture": "tiny", "model": {"num_layers": 3}, "training": {"num_steps": 5}}
    first = {"model": {"hidden_size": 8}}
    config = compose_run([first, recipe, {"model": {"conditioning": "gumbel"}}], ["model.num_layers=7"])
    assert (config.model.num_layers, config.model.hidden_size) == (7, 64)
    assert config.model.conditioning == "gumbel"


def test_amounts() -> None:
    """One replaces the other; an epoch is as many rows as the split has."""
    for preset, word, amounts in (("maze", "steps=9", (9, None)), ("small", "epochs=2", (None, 2))):
        training = compose_run([read_recipe(preset)], [f"training.num_{word}"]).training
        assert (training.num_steps, training.num_epochs) == amounts
    steps = [compose_run([read_recipe(p)]).training.steps_over(2000) for p in ("maze", "tiny")]
    assert steps == [1563, 1000]  # 200 x 2000 / 256 = 1562.5
    for amounts, got in (({"num_steps": 3, "num_epochs": 3}, "both"), ({}, "neither")):
        with pytest.raises(UsageError, match=rf"{got}.*num_steps or num_epochs"):
            compose_run([{"training": amounts}])
    cosine = OptimizationConfig(schedule="cosine", warmup_steps=2)
    assert cosine.rate_at(2, 3) == cosine.learning_rate, "the one step behind the warm-up"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("training.log_evry_steps=3", "log_every_steps"),
        ("optimisation.learning_rate=1.0", "optimization"),
        ("training.precision=fp16", "bf16"),
        ("optimization.learning_rate=nan", r"out of range \[optimization\.learning_rate\]"),
        ("training.num_steps=0", r"out of range \[training\.num_steps\]"),
        ("training.num_steps=3 training.num_epochs=1", r"both.*num_steps or num_epochs"),
    ],
)
def test_wrong_overrides_are_named(overrides: str, expected: str) -> None:
    """Of two options of one command neither is the later one."""
    with pytest.raises(UsageError, match=expected):
        compose_run([read_recipe("tiny")], overrides.split())


def test_what_a_change_would_alter_is_not_operational() -> None:
    for name, changes in (
        ("training.micro_batch_size", {"model__dropout": 0.1}),
        ("training.num_steps", {"model__diffusion__search_schedule": "true"}),
        ("training.num_steps", {"optimization__schedule": "cosine"}),
        ("training.num_epochs", {"optimization__schedule": "cosine"}),
    ):
        assert name in operational_fields(tiny_run())
        assert name not in operational_fields(tiny_run(**changes))


def test_a_run_of_an_older_version_goes_on_unless_a_setting_that_is_gone_did_something() -> None:
    recorded = json.loads(Path(__file__).with_name("recorded_config.json").read_text())
    retired = {"validation_batch_size", "peak_flops_per_second"}
    retired |= {name.rpartition(".")[2] for name in GONE}
    known = {**recorded, "model": grouped(recorded["model"])}
    for part in ("training", "optimization"):
        known[part] = {name: v for name, v in recorded[part].items() if name not in retired}
    free = operational_fields(from_mapping(RunConfig, known))

    def resume(saved: dict[str, Any] = recorded, **changes: object) -> None:
        config = to_mapping(resolve(RunConfig, known, {"model": changes}))
        require_same_run({"config": saved}, {"config": config}, free)

    assert {"kd", "noise_tau", "backbone"}.isdisjoint(recorded["model"])
    resume()
    for name, value in {"kd": {"kind": "token"}, "noise": {"tau": 0.5}, "num_heads": 1}.items():
        with pytest.raises(UsageError, match=rf"another setting.*model\.{name}"):
            resume(**{name: value})
    for part, name, value in (("optimization", "eps", 1e-6), ("model", "time_beta", 2.0), ("training", "retired", 1)):
        saved = {**recorded, part: {**recorded[part], name: value}}
        with pytest.raises(UsageError, match=rf"another setting.*{name}.*another --out"):
            resume(saved)


def test_heads_of_old_runs_have_seen_own_noise() -> None:
    seen, hidden = (to_mapping(tiny_run(student="medusa", model__backbone__own_noise=n)) for n in ("seen", "hidden"))
    backbone = {n: value for n, value in seen["model"]["backbone"].items() if n != "own_noise"}
    before = {"config": {**seen, "model": {**seen["model"], "backbone": backbone}}}
    require_same_run(before, {"config": seen}, set())
    with pytest.raises(UsageError, match="own_noise"):
        require_same_run(before, {"config": hidden}, set())


# Every setting.


SHORT = {"training__num_steps": 7, "training__validate_every_steps": 7, "optimization__ema_decay": 0.5}
"""More steps than an epoch has, so that a second draw of a row's noise is one of them."""
VALUES = {
    "model.attention": "sdpa", "model.backbone.head_output": "full", "model.backbone.head_rank": 3,
    "model.block_size": 4, "model.diffusion.max_loss_weight": 0.5, "model.diffusion.min_time": 0.2,
    "model.dropout": 0.3, "model.embedding_init_std": 0.5, "model.hidden_size": 32,
    "model.kd.kind": "token", "model.noise.layers": (1,), "model.num_heads": 4,
    "optimization.ema_decay": 0.1, "optimization.max_grad_norm": 0.1,
    "training.num_noise_draws": 1, "training.num_validation_rows": 4, "training.precision": "bf16",
    "training.trackers": ("tensorboard",), "training.validate_every_steps": 3, "student": "ar",
}  # fmt: skip
HOW_IT_RUNS = {
    *("checkpoint_every_steps", "device", "keep_every_steps", "keep_last"),
    *("noise_kernel", "num_workers", "sharding", "trackers"),
}
"""Of ``training``, with attention: to one CPU they are the same to the bit."""
FREE = {f"training.{name}" for name in HOW_IT_RUNS} | {"model.attention"}
LONGER = {"training.num_steps", "training.num_epochs", "training.micro_batch_size"}
"""These change a result's last bits or its end, and not the way there."""
ELSEWHERE = {*("model.backbone.location", "model.language_model", "model.predicts_next"), "training.num_epochs"}
"""Of other models, and in place of the steps: other tests have them."""


def bases(tmp_path: Path) -> Iterator[tuple[RunConfig, Path]]:
    """Short runs and their stores; every setting does something in one of them."""
    store, backbone = write_store(tmp_path / "store"), write_backbone(tmp_path / "backbone")
    scored = store_of(tmp_path / "scored", backbone)
    noise = {"model__noise__rank": 3, "model__noise__prior_share": 0.5}
    yield tiny_run(**SHORT, **noise), store
    teacher = {"model__conditioning": "none", "model__kd__kind": "token"}
    yield tiny_run(**SHORT, **teacher, optimization__weight_decay=0.1), store
    clips = {"model__diffusion__min_time": 0.45, "model__diffusion__max_time": 0.55}
    yield tiny_run(**SHORT, **clips, student="bd3lm", model__block_size=2), store
    yield tiny_run(**SHORT, model__noise__layers="[1]", model__noise__injection="add"), store
    heads = {"model__backbone__head_output": "low_rank", "model__backbone__head_rank": 2}
    yield backbone_run(backbone, **SHORT, **heads), scored
    yield backbone_run(backbone, "drafter", **SHORT), scored


def test_every_setting_does_something_or_is_known_not_to(tmp_path: Path) -> None:
    """A setting that is declared, shown and validated could still be read by nobody.

    Those that change no bit are tried on one student, which has a choice of attention.
    """
    silent = {name for name, _ in changed(tiny_run(), VALUES)} - ELSEWHERE
    for number, (base, store) in enumerate(bases(tmp_path)):

        def result(config: RunConfig, name: str) -> object:
            out = tmp_path / f"{number}-{name}"  # noqa: B023 - called in this turn
            assert train(config, store, out)  # noqa: B023
            return run_files(out), metrics_without_timing(out)

        own = result(base, "base")
        for name, other in changed(base, VALUES):
            if name in silent and other is not None and (name not in FREE or base.student == "bd3lm"):
                with suppress(UsageError):  # this student does not read it
                    if result(other, name) != own:
                        silent.remove(name)
    assert silent == FREE


@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_no_run_goes_on_under_another_setting(student: str) -> None:
    base = tiny_run(student=student)
    saved, free = {"config": to_mapping(base)}, set()
    for name, other in changed(base, VALUES):
        if other is not None:
            with suppress(UsageError):
                now = {"config": to_mapping(other)}
                require_same_run(saved, now, operational_fields(other))
                free.add(name)
    unread = {name for name in free if name.startswith("model.backbone.")}
    unread |= set() if student == "bd3lm" else {"model.block_size"}
    assert free - unread == FREE | LONGER - {"training.num_epochs"}
