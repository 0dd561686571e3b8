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
from trainer.training.checkpoint import operational_fields, require_same_run
from trainer.training.settings import RECIPES, RunConfig, compose_run, read_recipe

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_recipes(name: str) -> None:
    config = compose_run([read_recipe(name)])
    assert config.training.num_steps or config.training.num_epochs


def test_the_small_recipe_is_the_papers() -> None:
    config = compose_run([read_recipe("small")])
    model, optimization = config.model, config.optimization
    assert (model.num_layers, model.hidden_size, model.dropout) == (12, 768, 0.1)
    assert (config.training.num_steps, config.training.global_batch_size) == (1_000_000, 512)
    assert (optimization.learning_rate, optimization.warmup_steps) == (3e-4, 2500)
    assert (optimization.beta1, optimization.beta2, optimization.eps) == (0.9, 0.999, 1e-8)
    assert (optimization.weight_decay, optimization.max_grad_norm) == (0.0, 1.0)
    assert (optimization.schedule, optimization.ema_decay) == ("constant", 0.9999)


@pytest.mark.parametrize(
    "path",
    sorted(path for path in CONFIGS.glob("*.toml") if "student" in read_toml(path)),
    ids=lambda path: path.stem,
)
def test_shipped_configs(path: Path) -> None:
    compose_run([read_toml(path), {"model": {"conditioning": "gumbel"}}])


def test_block_diffusion_configs_add_up_to_a_million_steps() -> None:
    for corpus in ("owt", "lm1b"):
        names = (f"{corpus}-bd3lm-pretrain", f"{corpus}-bd3lm")
        parts = [compose_run([read_toml(CONFIGS / f"{name}.toml")]) for name in names]
        assert [part.training.num_steps for part in parts] == [850_000, 150_000]
        assert [part.model.block_size for part in parts] == [None, 4]


def test_later_sources_win_and_an_architecture_can_be_refined() -> None:
    recipe = {"architecture": "tiny", "model": {"num_layers": 3}, "training": {"num_steps": 5}}
    config = compose_run([recipe, {"model": {"conditioning": "gumbel"}}], ["model.num_layers=7"])
    assert (config.model.num_layers, config.model.hidden_size) == (7, 64)
    assert config.model.conditioning == "gumbel"


def test_an_amount_replaces_the_other_one() -> None:
    config = compose_run([read_recipe("maze")], ["training.num_steps=9"])
    assert (config.training.num_steps, config.training.num_epochs) == (9, None)
    config = compose_run([read_recipe("small")], ["training.num_epochs=2"])
    assert (config.training.num_steps, config.training.num_epochs) == (None, 2)


def test_an_epoch_is_as_many_rows_as_the_split_has() -> None:
    config = compose_run([read_recipe("maze")])
    assert config.training.steps_over(2000) == 1563  # 200 x 2000 / 256 = 1562.5
    assert compose_run([read_recipe("tiny")]).training.steps_over(2000) == 1000


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
    ],
)
def test_wrong_overrides_are_named(override: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        compose_run([read_recipe("tiny")], [override])


def test_only_operational_fields_may_change_between_runs() -> None:
    before = {"config": to_mapping(tiny_run())}
    config = tiny_run(training__num_workers=3)
    require_same_run(before, {"config": to_mapping(config)}, operational_fields(config))
    config = tiny_run(training__precision="bf16")
    with pytest.raises(UsageError, match=r"training\.precision"):
        require_same_run(before, {"config": to_mapping(config)}, operational_fields(config))


def test_what_a_change_would_alter_is_not_operational() -> None:
    micro, steps = "training.micro_batch_size", "training.num_steps"
    assert {micro, steps} <= operational_fields(tiny_run())
    assert micro not in operational_fields(tiny_run(model__dropout=0.1))
    assert steps not in operational_fields(tiny_run(model__diffusion__search_schedule="true"))


@pytest.mark.parametrize("value", ["inf", "nan", "0"])
def test_a_learning_rate_is_a_positive_number(value: str) -> None:
    with pytest.raises(UsageError, match=r"optimization\.learning_rate"):
        tiny_run(optimization__learning_rate=value)


def test_a_field_of_an_older_version_is_named() -> None:
    config = tiny_run()
    before = {"config": {**to_mapping(config), "retired": 1}}
    with pytest.raises(UsageError, match="retired"):
        require_same_run(before, {"config": to_mapping(config)}, operational_fields(config))


def test_a_run_from_before_a_setting_came_goes_on_at_its_default() -> None:
    recorded = json.loads(Path(__file__).with_name("recorded_config.json").read_text())
    retired = {"validation_batch_size", "peak_flops_per_second"}
    training = {k: v for k, v in recorded["training"].items() if k not in retired}
    known = {**recorded, "training": training, "model": grouped(recorded["model"])}
    free = operational_fields(from_mapping(RunConfig, known))

    def resume(**changes: object) -> None:
        config = to_mapping(resolve(RunConfig, known, {"model": changes}))
        require_same_run({"config": recorded}, {"config": config}, free)

    assert {"kd", "noise_tau", "backbone"}.isdisjoint(recorded["model"])
    resume()
    for name, value in {"kd": {"kind": "token"}, "noise": {"tau": 0.5}, "num_heads": 1}.items():
        with pytest.raises(UsageError, match=rf"another setting.*model\.{name}"):
            resume(**{name: value})
    recorded["model"]["time_beta"] = 2.0  # what is gone cannot go on, unless it did nothing
    with pytest.raises(UsageError, match=r"another setting.*time_beta"):
        resume()


@pytest.mark.parametrize(("own_noise", "is_same"), [("seen", True), ("hidden", False)])
def test_heads_from_before_own_noise_could_be_hidden_have_seen_it(
    own_noise: str, is_same: bool
) -> None:
    config = to_mapping(tiny_run(student="medusa", model__backbone__own_noise=own_noise))
    backbone = {n: value for n, value in config["model"]["backbone"].items() if n != "own_noise"}
    model = {**config["model"], "backbone": backbone}
    before = {"config": {**config, "model": model}}
    with nullcontext() if is_same else pytest.raises(UsageError, match="own_noise"):
        require_same_run(before, {"config": config}, set())


def test_the_papers_larger_student() -> None:
    config = compose_run([read_toml(CONFIGS / "lm1b-mdlm-medium.toml")])
    assert (config.model.num_layers, config.model.hidden_size) == (24, 1024)
    assert (config.training.num_steps, config.training.global_batch_size) == (1_000_000, 512)


def test_distillation_recipes() -> None:
    kinds = [
        read_toml(CONFIGS / f"{name}-kd.toml")["model"]["kd"]["kind"]
        for name in ("token", "sequence")
    ]
    assert kinds == ["token", "sequence"]
    text = (CONFIGS / "sequence-kd.toml").read_text(encoding="utf-8")
    assert "gdistill-extract --mode sequential" in text
