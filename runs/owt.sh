#!/usr/bin/env bash
# OpenWebText as in the paper, from corpus to scores: MDLM and BD3-LM, each with and without noise.
#
#   bash runs/owt.sh                  # the real thing; see below what it takes
#   SIZE=toy TEXT='stories/*.txt' TEACHER=path/to/a/small/model bash runs/owt.sh     # minutes on a CPU
#
# Every step resumes: run the same command again after whatever stopped it. OUT says where all goes.
#
# What the real thing takes, by `gdistill-extract ... --plan --tokens 9e9 --price 2.5` for a teacher of
# GPT-2-Large's shape (its bytes are measured on synthetic distributions, its hours assume 40% of an
# H100's bf16 peak; no GPU has confirmed them yet):
#   stage 1        9.0e9 tokens, 8.8M rows of 1,024, on CPU cores (on a cluster: runs/slurm/tokens.sbatch)
#   stage 2        1.03 TB of shards (115 B/token), 10 GPU hours, 25 at 2.50 an hour; once, for all students
#   four students  1M steps of 512 rows each (5.2e11 tokens): the paper's own budget, days on a node of 8
set -euo pipefail
cd "$(dirname "$0")/.."
SIZE=${SIZE:-paper}
OUT=${OUT:-out/owt-$SIZE}
STORE=${STORE:-$OUT/store}
export PATH="$PWD/.venv/bin:$PATH"

if [ "$SIZE" = toy ]; then
  corpus="text:${TEXT:?SIZE=toy reads local text: set TEXT to a file or glob}"
  teacher=${TEACHER:?SIZE=toy needs a local teacher: set TEACHER}
  judge=${JUDGE:-$teacher}
  extract=(--row-length "${ROW_LENGTH:-64}" --set corpus.validation_fraction=0.1)
  steps=${STEPS:-20}
  train=(--preset tiny --set training.num_steps="$steps" --set training.global_batch_size=8
    --set optimization.warmup_steps=2)
  block=(--set model.block_size=4)
  num=8 nfe=4,8
  mdlm=() pretrain=() bd3lm=("${block[@]}")
else
  corpus=owt
  teacher=${TEACHER:-gpt2-large}
  judge=${JUDGE:-gpt2-large}
  extract=(--dtype bfloat16)
  train=()
  num=5000 nfe=128,256,1024
  mdlm=(--config configs/owt-mdlm.toml)
  pretrain=(--config configs/owt-bd3lm-pretrain.toml)
  bd3lm=(--config configs/owt-bd3lm.toml)
fi
# One process a GPU where there are several; see runs/slurm for many nodes.
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
if [ "$gpus" -gt 1 ]; then
  run_extract=(accelerate launch --multi_gpu --num_processes "$gpus" --no_python gdistill-extract)
  run_train=(torchrun --standalone --nproc-per-node "$gpus" --no-python gdistill-train)
else
  run_extract=(gdistill-extract) run_train=(gdistill-train)
fi

echo "== shards: the teacher, once"
"${run_extract[@]}" --corpus "$corpus" --teacher "$teacher" --out "$OUT" --store "$STORE" "${extract[@]}"

for conditioning in none gumbel; do
  echo "== MDLM, conditioning $conditioning"
  "${run_train[@]}" run --store "$STORE" --student mdlm --conditioning "$conditioning" \
    "${mdlm[@]}" "${train[@]}" --out "$OUT/mdlm-$conditioning"

  echo "== BD3-LM, conditioning $conditioning: rows as one block first, then blocks of 4"
  "${run_train[@]}" run --store "$STORE" --student bd3lm --conditioning "$conditioning" \
    "${pretrain[@]}" "${train[@]}" --out "$OUT/bd3lm-pretrain-$conditioning"
  "${run_train[@]}" run --store "$STORE" --student bd3lm --conditioning "$conditioning" \
    "${bd3lm[@]}" "${train[@]}" --init-from "$OUT/bd3lm-pretrain-$conditioning" \
    --out "$OUT/bd3lm-$conditioning"
done

for student in mdlm-none mdlm-gumbel bd3lm-none bd3lm-gumbel; do
  echo "== samples and scores: $student"
  # NFE counts the passes of a sequence; a BD3-LM makes one per token of a block unless told.
  passes=(--nfe "$nfe")
  case $student in bd3lm-*) passes=() ;; esac
  gdistill-sample "$OUT/$student" --num "$num" "${passes[@]}" --nucleus-p 0.9 --out "$OUT/samples/$student"
  gdistill-eval "$OUT/samples/$student" --judge "$judge"
done
