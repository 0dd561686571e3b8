#!/usr/bin/env bash
# Rounds of self-distillation through time (SDTT; `model.kd=through_time`): in each, a student learns to say
# in one step what the model of the round before says in two. With noise as input, it is held fixed.
#
#   STORE=out/stories/store START=out/stories/narrow OUT=out/stories/sdtt-narrow LEARNING_RATE=2e-4 \
#     bash runs/through_time.sh --preset tiny --conditioning none --set model.hidden_size=128 \
#     --set model.num_layers=4 --set model.num_heads=4 --set training.precision=bf16
#
# START is a finished run; the further words are those of its shape. A round is a run of its own,
# OUT-<dt>, dt being the length of a step of the model that teaches it; the same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
store=${STORE:?set STORE to the store that START was trained on}
start=${START:?set START to a finished run}
out=${OUT:?set OUT to the beginning of the names of the rounds}
STEPS=${STEPS:-200}
export PATH="$PWD/.venv/bin:$PATH"

for time_step in ${TIME_STEPS:-0.015625 0.03125 0.0625 0.125}; do
  echo "== two steps of $time_step become one"
  gdistill-train run --store "$store" --student mdlm --init-from "$start" --out "$out-$time_step" \
    --set model.kd=through_time --set model.kd_time_step="$time_step" --set model.max_loss_weight=1.0 \
    --set training.num_steps="$STEPS" --set training.global_batch_size="${BATCH:-16}" \
    --set training.validate_every_steps="$STEPS" --set training.checkpoint_every_steps=100 \
    --set optimization.learning_rate="${LEARNING_RATE:-6e-5}" --set optimization.schedule=constant \
    --set optimization.warmup_steps=20 --set optimization.ema_decay=0.98 --set seed=0 "$@"
  start="$out-$time_step"
done
