"""Recipes, files and overrides compose into one config; every shipped recipe is valid."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from shards.errors import UsageError
from shards.settings import from_mapping, read_toml, resolve, to_mapping
from tests.trainer.run_cases import tiny_run
from trainer.students.configuration import grouped
from trainer.training.resume import GONE, operational_fields, require_same_run
from trainer.training.settings import RECIPES, RunConfig, compose_run, read_recipe

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
STUDENTS = sorted(path for path in CONFIGS.glob("*.toml") if "student" in read_toml(path))


def test_the_small_recipe_is_the_papers() -> None:
    config = compose_run([read_recipe("small")])
    model, optimization = config.model, config.optimization
    assert (model.num_layers, model.hidden_size, model.dropout) == (12, 768, 0.1)
    assert (config.training.num_steps, config.training.global_batch_size) == (1_000_000, 512)
    assert (optimization.learning_rate, optimization.warmup_steps) == (3e-4, 2500)
    assert (optimization.beta1, optimization.beta2) == (0.9, 0.999)
    assert (optimization.weight_decay, optimization.max_grad_norm) == (0.0, 1.0)
    assert (optimization.schedule, optimization.ema_decay) == ("constant", 0.9999)


@pytest.mark.parametrize("path", [*RECIPES.glob("*.toml"), *STUDENTS], ids=lambda path: path.stem)
def test_what_is_shipped(path: Path) -> None:
    compose_run([read_toml(path), {"model": {"conditioning": "gumbel"}}])


def test_configs_of_the_paper() -> None:
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
    config = compose_run([recipe, {"model": {"conditioning": "gumbel"}}], ["model.num_layers=7"])
    assert (config.model.num_layers, config.model.hidden_size) == (7, 64)
    assert config.model.conditioning == "gumbel"


def test_amounts() -> None:
    """One replaces the other; an epoch is as many rows as the split has."""
    for preset, word, amounts in (("maze", "steps=9", (9, None)), ("small", "epochs=2", (None, 2))):
        training = compose_run([read_recipe(preset)], [f"training.num_{word}"]).training
        assert (training.num_steps, training.num_epochs) == amounts
    steps = [compose_run([read_recipe(p)]).training.steps_over(2000) for p in ("maze", "tiny")]
    assert steps == [1563, 1000]  # 200 x 2000 / 256 = 1562.5


@pytest.mark.parametrize("words", [[], ["training.num_steps=3", "training.num_epochs=1"]])
def test_both_amounts_at_once_are_refused(words: list[str]) -> None:
    """In a file, and in two options of one command, of which neither is the later one."""
    file = {} if words else {"training": {"num_steps": 3, "num_epochs": 3}}
    with pytest.raises(UsageError, match=r"both.*num_steps or num_epochs"):
        compose_run([read_recipe("tiny"), file], words)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.log_evry_steps=3", "log_every_steps"),
        ("optimisation.learning_rate=1.0", "optimization"),
        ("training.keep_last=0", "keep_last"),
        ("training.precision=fp16", "bf16"),
        *((f"optimization.learning_rate={n}", "learning_rate") for n in ("inf", "nan", "0")),
    ],
)
def test_wrong_overrides_are_named(override: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        compose_run([read_recipe("tiny")], [override])


def test_only_operational_fields_may_change_between_runs() -> None:
    before = {"config": to_mapping(tiny_run())}
    old = {"config": {**before["config"], "retired": 1}}
    for saved, changes, refused in (
        (before, {"training__num_workers": 3}, None),
        (before, {"training__precision": "bf16"}, r"training\.precision"),
        (old, {}, "retired"),
    ):
        config = tiny_run(**changes)
        with pytest.raises(UsageError, match=refused) if refused else nullcontext():
            require_same_run(saved, {"config": to_mapping(config)}, operational_fields(config))


def test_what_a_change_would_alter_is_not_operational() -> None:
    micro, steps = "training.micro_batch_size", "training.num_steps"
    assert {micro, steps} <= operational_fields(tiny_run())
    assert micro not in operational_fields(tiny_run(model__dropout=0.1))
    assert steps not in operational_fields(tiny_run(model__diffusion__search_schedule="true"))


def test_a_run_of_an_older_version_goes_on_unless_a_setting_that_is_gone_did_something() -> None:
    recorded = json.loads(Path(__file__).with_name("recorded_config.json").read_text())
    retired = {"validation_batch_size", "peak_flops_per_second"}
    retired |= {name.rpartition(".")[2] for name in GONE}
    known = {**recorded, "model": grouped(recorded["model"])}
    for part in ("training", "optimization"):
        known[part] = {name: v for name, v in recorded[part].items() if name not in retired}
    free = operational_fields(from_mapping(RunConfig, known))

    def resume(**changes: object) -> None:
        config = to_mapping(resolve(RunConfig, known, {"model": changes}))
        require_same_run({"config": recorded}, {"config": config}, free)

    assert {"kd", "noise_tau", "backbone"}.isdisjoint(recorded["model"])
    resume()
    for name, value in {"kd": {"kind": "token"}, "noise": {"tau": 0.5}, "num_heads": 1}.items():
        with pytest.raises(UsageError, match=rf"another setting.*model\.{name}"):
            resume(**{name: value})
    for part, name, value in (("optimization", "eps", 1e-6), ("model", "time_beta", 2.0)):
        before, recorded[part] = recorded[part], {**recorded[part], name: value}
        with pytest.raises(UsageError, match=rf"another setting.*{name}.*another --out"):
            resume()
        recorded[part] = before


@pytest.mark.parametrize(("own_noise", "is_same"), [("seen", True), ("hidden", False)])
def test_heads_from_before_own_noise_could_be_hidden_have_seen_it(
    own_noise: str, is_same: bool
) -> None:
    config = to_mapping(tiny_run(student="medusa", model__backbone__own_noise=own_noise))
    backbone = {n: value for n, value in config["model"]["backbone"].items() if n != "own_noise"}
    before = {"config": {**config, "model": {**config["model"], "backbone": backbone}}}
    with nullcontext() if is_same else pytest.raises(UsageError, match="own_noise"):
        require_same_run(before, {"config": config}, set())
