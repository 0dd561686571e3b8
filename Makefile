# gdistill: corpus -> tokens -> teacher -> shards -> student -> scores
# `make` lists the targets. Every target that needs the environment makes it first.

PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
STAMP    = $(VENV)/.installed-$(EXTRAS)

# `make extract` leaves out/latest pointing at its folder; train and sample go on there unless told
# otherwise by CORPUS, OUT, SHARDS or MODEL.
ifdef CORPUS
# stories.txt, 'text:stories/*.txt' and jsonl:stories.jsonl#text all go to out/stories; a preset, a
# data set of the hub and a maze to their names.
OUT     ?= out/$(shell printf '%s' '$(CORPUS)' | sed -E -e 's,\#[^/]*$$,,' \
             -e 's,^(text|jsonl|csv|parquet|hf):,,' -e ':a' -e 's,(^|/)[^/]*[*?[][^/]*$$,,' -e 'ta' \
             -e 's,/+$$,,' -e 's,.*/,,' -e 's,\.(gz|zst)$$,,' \
             -e 's,\.(txt|text|md|jsonl|ndjson|csv|tsv|parquet|toml)$$,,' \
             -e 's,[^A-Za-z0-9._-]+,_,g' -e 's,^[._]*$$,corpus,')
else
OUT     ?= out/latest
endif
TEACHER ?=
CODEC   ?= posterior
STUDENT ?= mdlm
PRESET  ?= tiny
CONDITIONING ?= $(if $(filter ar drafter,$(STUDENT)),none,gumbel)
# Distillation: token (KL to the teacher's stored probabilities), or sequence (rows it wrote itself).
KD      ?=
# two-stage: without noise first, then as many steps with noise that is read behind every block, what measures best
# (benchmarks/results/quality-tried.md); paper: one training, as CONDITIONING and KD say, which choose it too.
RECIPE  ?= $(if $(and $(filter mdlm bd3lm,$(STUDENT)),$(filter file,$(origin CONDITIONING)),$(if $(KD),,1)),two-stage,paper)
BACKBONE ?=
# What the student begins with: a trained student, or a language model of transformers.
INIT_FROM ?=
# How students of this recipe are nearest the text (benchmarks/results/quality-stories-fidelity.md): in confidence order,
# and under the noise they were trained on. (One pass over a block of 8 tokens and more is better drawn:
# ARGS='--decision categorical --tau 0.85 --set temperature=0.7'.)
NEAREST_mdlm  = --sampler confidence --decision categorical --tau 1 --set temperature=0.7
NEAREST_bd3lm = --set inner=confidence --decision argmax --tau 1
BUDGET = $(if $(filter ar medusa drafter,$(STUDENT)),,$(if $(and $(filter bd3lm,$(STUDENT)),$(filter file,$(origin NFE))),--passes-per-block $(PASSES),--nfe $(NFE)))
SHARDS  ?= $(OUT)/store
MODEL   ?= $(OUT)/$(STUDENT)-$(if $(filter paper,$(RECIPE)),$(CONDITIONING),$(RECIPE))$(addprefix -kd-,$(KD))
SAMPLES ?= samples
JUDGE   ?=
REFERENCE ?=
NFE     ?= 16
# Of a BD3-LM: forward passes of each block of tokens. NFE, where it is given, is of the whole sequence.
PASSES  ?= 2
NUM     ?= 64
STEPS   ?=
ARGS    ?=
# Tests that run beside each other, and the threads of each.
JOBS    ?= 2
# What `make setup` installs besides: `evaluation` brings lm-evaluation-harness, `integrations` trl and datatrove.
EXTRAS  ?= dev
THREADS ?= 1
PORTABLE ?= default:1 avx2:2
# Tests of this environment: vLLM and dllm each need one of their own.
HERE = not engine and not dllm
SENSITIVE = tests/pipeline/teacher tests/pipeline/test_maze.py tests/pipeline/extract/test_extract.py \
            tests/shards/noise tests/shards/language_model tests/trainer/students

export TOKENIZERS_PARALLELISM ?= true
# Threads that spin at a barrier starve each other wherever another process wants the core too.
export OMP_WAIT_POLICY ?= passive

# vLLM lives in an environment of its own: it has its own torch. ENGINE_SETUP makes one in a folder.
ENGINE  ?= .vllm
ENGINE_SETUP ?= $(wildcard ../shared/tools/vllm/setup)
DRAFTER ?=
LOOKAHEAD ?= 4
PORT    ?= 8000
ENGINE_STAMP = $(ENGINE)/.with-gdistill

.DEFAULT_GOAL := help
.PHONY: help setup demo maze extract train sample references eval test test-slow test-all test-portable test-portable-sample lint bench \
        bench-sampling bench-extract gpu clean

help: ## list the targets and the variables
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'
	@printf '\nVariables, as in make train STUDENT=bd3lm STEPS=2000:\n'
	@sed -nE 's/^#: ([A-Z_]+) +(.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "  %-20s %s\n", $$1, $$2}'

#: CORPUS        files, a preset (owt, lm1b, ...), a data set of the hub, or maze:k4
#: TEACHER       folder or hub id of the autoregressive teacher
#: CODEC         what a shard holds: posterior, seeded, topk, full, quantized, hidden
#: OUT           folder of the shards (out/NAME of the corpus)
#: SHARDS        the store that train, references read (OUT/store)
#: STUDENT       mdlm, bd3lm, ar, medusa, drafter
#: PRESET        size of the student: tiny, small, medium, maze
#: RECIPE        two-stage (default with noise) or paper
#: CONDITIONING  gumbel or none
#: KD            token or sequence: knowledge distillation; empty for none
#: BACKBONE      the frozen language model of medusa and drafter
#: INIT_FROM     what the student begins with: a trained student or a language model
#: STEPS         training steps, instead of the preset's
#: MODEL         folder of the training (under OUT)
#: NUM           samples, or rows of references (64)
#: NFE           forward passes of a sequence (16)
#: PASSES        forward passes of each block of a BD3-LM (2), where NFE is not given
#: SAMPLES       folder of the samples (samples)
#: JUDGE         the language model that scores samples
#: REFERENCE     texts of the corpus, for MAUVE and distances
#: DRAFTER       a student that drafts in the engine
#: LOOKAHEAD     tokens it drafts at once (4)
#: ENGINE        folder of the environment with vLLM (.vllm)
#: ENGINE_SETUP  a script that makes that environment, where there is none
#: PORT          of the server (8000)
#: ARGS          more options for the command, as they are
#: JOBS          tests beside each other (2)
#: THREADS       threads of each test (1)
#: PORTABLE      kernels:threads pairs of test-portable
#: EXTRAS        extras of pyproject.toml that setup installs (dev)
#: PYTHON        the interpreter that makes the environment (python3)
#: VENV          its folder (.venv)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

setup: $(STAMP) ## create .venv with everything pinned

demo: $(STAMP) ## the main job in four minutes: a maze, its teacher, two students, a table, a picture
	$(BIN)/python -m runs.demo $(if $(STEPS),--steps $(STEPS)) $(ARGS)

maze: $(STAMP) ## the paper's full maze protocol on both mazes, three seeds
	$(BIN)/python -m benchmarks.quality benchmarks/quality/maze-k4.toml $(ARGS)
	$(BIN)/python -m benchmarks.quality benchmarks/quality/maze-m57.toml $(ARGS)

extract: $(STAMP) ## stage 1 and 2: make extract CORPUS=owt TEACHER=gpt2-large CODEC=posterior
	@test -n '$(CORPUS)' || { echo "error: no corpus; make extract CORPUS=maze:k4 | owt | FILES [TEACHER=...]"; exit 2; }
	$(BIN)/gdistill-extract --corpus '$(CORPUS)' $(if $(TEACHER),--teacher '$(TEACHER)') \
	  --codec $(CODEC) --out '$(OUT)' $(ARGS)
	@mkdir -p out && ln -sfn "$$(realpath '$(OUT)')" out/latest

train: $(STAMP) ## train a student from shards: make train STUDENT=bd3lm SHARDS=out/owt/store
	$(BIN)/gdistill-train $(if $(filter paper,$(RECIPE)),run,$(RECIPE)) --store '$(SHARDS)' --student $(STUDENT) \
	  $(if $(filter drafter,$(STUDENT)),--config configs/drafter.toml,--preset $(PRESET)) --out '$(MODEL)' \
	  $(if $(filter paper,$(RECIPE)),--conditioning $(CONDITIONING)) \
	  $(if $(KD),--kd $(KD)) $(if $(BACKBONE),--backbone '$(BACKBONE)') \
	  $(if $(INIT_FROM),--init-from '$(INIT_FROM)') \
	  $(if $(STEPS),--set training.num_steps=$(STEPS)) $(ARGS)

sample: $(STAMP) ## draw samples from a trained student: make sample MODEL=... NFE=16 NUM=64
	$(BIN)/gdistill-sample '$(MODEL)/model' --num $(NUM) \
	  $(BUDGET) --out '$(SAMPLES)' \
	  $(if $(filter two-stage,$(RECIPE)),$(NEAREST_$(STUDENT))) $(ARGS)

references: $(STAMP) ## rows of the corpus as text, to compare samples with: make references NUM=1000
	$(BIN)/gdistill-extract references '$(SHARDS)' --num $(NUM) --out '$(OUT)/references.jsonl'

eval: $(STAMP) ## score samples: make eval SAMPLES=samples JUDGE=gpt2-large REFERENCE=out/latest/references.jsonl
	$(BIN)/gdistill-eval '$(SAMPLES)' $(if $(JUDGE),--judge '$(JUDGE)') \
	  $(if $(REFERENCE),--reference '$(REFERENCE)') $(ARGS)

test: $(STAMP) ## the test suite
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(JOBS) -m 'not slow and $(HERE)' $(ARGS)

test-slow: $(STAMP) ## what it leaves out: worlds of several processes, kill trials, the pretended GPU
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(JOBS) -m slow $(ARGS)

test-all: test test-slow ## both

# Other kernels, other thread counts: no test may hang on the rounding of one CPU. Every kernel and
# every count once; PORTABLE="default:1 default:2 avx2:1 avx2:2" runs all pairs, twice as long.
test-portable: $(STAMP) ## the test suite under other kernels of the CPU, with 1 and 2 threads (ARGS: which tests)
	@set -e; for pair in $(PORTABLE); do kernels=$${pair%:*} threads=$${pair#*:}; \
	  echo "kernels $$kernels, threads $$threads"; \
	  ATEN_CPU_CAPABILITY=$$kernels MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=$$threads \
	    $(BIN)/python -m pytest -n $(JOBS) -m '$(HERE)' $(ARGS); \
	done

test-portable-sample: $(STAMP) ## the tests that rounding can reach, under the plainest kernels
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m '$(HERE)' $(SENSITIVE)

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: bench-sampling bench-extract ## all benchmarks that need no GPU

bench-sampling: $(STAMP) ## tokens per second of every sampler
	$(BIN)/python -m benchmarks.sampling --out benchmarks/results $(ARGS)

bench-extract: $(STAMP) ## extraction against the bare teacher forward
	$(BIN)/python -m benchmarks.extract --teacher gpt2-small --rows 24 --threads 1 --out benchmarks/results $(ARGS)

gpu: $(STAMP) ## on a GPU: checks, then every figure with a bar, within 8 minutes; JSON and page
	$(BIN)/python -m benchmarks.gpu_suite $(ARGS)

$(ENGINE_STAMP): pyproject.toml $(STAMP)
	@test -x $(ENGINE)/bin/vllm || test -n '$(ENGINE_SETUP)' || { echo "error: no vLLM in $(ENGINE); set ENGINE to an environment with vLLM 0.32, or ENGINE_SETUP to a script that makes one in the folder it is given"; exit 2; }
	test -x $(ENGINE)/bin/vllm || $(ENGINE_SETUP) $(ENGINE)
	# Ours, and behind the engine's own packages those that it lacks.
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
	  "$$($(ENGINE)/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_gdistill_needs.pth"
	@touch $@

engine: $(ENGINE_STAMP) ## vLLM in $(ENGINE), with the plugin

# In variables: a comma would end an argument of $(if).
DRAFTING = {"gdistill_drafter": "$(DRAFTER)"}
DRAFTS = {"method": "custom_class", "model": "trainer.serving.drafters.StudentDrafter", "num_speculative_tokens": $(LOOKAHEAD)}

serve: $(ENGINE_STAMP) ## vLLM with shared noise: make serve TEACHER=path/or/hub-id [DRAFTER=RUN/model] [PORT=8000]
	@test -n '$(TEACHER)' || { echo "error: no model; make serve TEACHER=path/or/hub-id [DRAFTER=RUN/model]"; exit 2; }
	@echo 'when it is up: curl http://127.0.0.1:$(PORT)/v1/completions -H "Content-Type: application/json" -d '"'"'{"model": "$(TEACHER)", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 1}'"'"
	VLLM_PLUGINS=gdistill $(ENGINE)/bin/vllm serve '$(TEACHER)' --host 127.0.0.1 --port $(PORT) \
	  --middleware trainer.serving.asgi.SeededAnswers \
	  $(if $(DRAFTER),--additional-config '$(DRAFTING)' --speculative-config '$(DRAFTS)') $(ARGS)

test-engine: $(ENGINE_STAMP) ## the tests that need a real vLLM, ten minutes at most
	GDISTILL_ENGINE='$(ENGINE)' OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine $(ARGS)

bench-serving: $(ENGINE_STAMP) ## shared noise in vLLM: make bench-serving TEACHER=... [DRAFTER=RUN/model]
	$(BIN)/python -m benchmarks.serving --engine '$(ENGINE)' --teacher '$(TEACHER)' \
	  $(if $(DRAFTER),--drafter '$(DRAFTER)') --out benchmarks/results $(ARGS)

clean: ## remove outputs (never the shards elsewhere)
	rm -rf out samples
