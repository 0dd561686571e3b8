#!/usr/bin/env bash
# Four students of one store of stories, and every measurement of the evaluation on them: perplexity at
# equal entropy, validation perplexity, MAUVE, infilling, a comparison, questions, a page.
#
#   TEXT='stories/*.txt' TEACHER=path/to/a/small/model bash runs/stories.sh
#
# Students of D = 512, plain and with noise (w = 0 is the paper's conditioner, w = 1 has the unigram in
# it), and `narrow`, the shape and loss weight in which a plain student does best. STEPS of 16 rows of 128
# tokens: 5,000 take half an hour a student and core. QUESTIONS is a folder of question files; without it
# that part is left out. Every step resumes: run the same command again.
set -euo pipefail
cd "$(dirname "$0")/.."
text=${TEXT:?set TEXT to a file or glob of stories}
teacher=${TEACHER:?set TEACHER to a causal language model, a folder or hub id}
judge=${JUDGE:-$teacher}
STEPS=${STEPS:-5000}
NUM=${NUM:-64}
NFE=${NFE:-4,8,16,32}
OUT=${OUT:-out/stories}
MODELS=${MODELS:-plain narrow w0 w1}
export PATH="$PWD/.venv/bin:$PATH"
train=(--preset tiny --set training.num_steps="$STEPS" --set training.global_batch_size=16
  --set training.precision=bf16 --set training.noise_kernel=compiled
  --set training.validate_every_steps=400 --set training.log_every_steps=200
  --set training.checkpoint_every_steps=1000)
wide="--set model.hidden_size=${HIDDEN_SIZE:-512} --set model.num_layers=2 --set model.num_heads=8"
wide+=" --set optimization.learning_rate=5e-4 --set optimization.warmup_steps=200"
small="--set model.hidden_size=128 --set model.num_layers=4 --set model.num_heads=4"
small+=" --set optimization.learning_rate=1e-3 --set optimization.warmup_steps=100"
declare -A kind=(
  [plain]="--conditioning none $wide --set model.noise.prior_weight=0.0"
  [narrow]="--conditioning none $small --set model.diffusion.max_loss_weight=1.0"
  [w0]="--conditioning gumbel $wide --set model.noise.prior_weight=0.0"
  [w1]="--conditioning gumbel $wide --set model.noise.prior_weight=1.0"
)

echo "== shards: the teacher, once"
gdistill-extract --corpus "text:$text" --teacher "$teacher" --out "$OUT" --row-length 128 \
  --set corpus.validation_fraction=0.05
gdistill-extract references "$OUT/store" --out "$OUT/references.jsonl"
gdistill-eval rows "$OUT/store" --num "${ROWS:-300}" --out "$OUT/infill.jsonl"

for model in $MODELS; do
  echo "== student $model"
  # shellcheck disable=SC2086  # words, not one
  gdistill-train run --store "$OUT/store" --student mdlm "${train[@]}" ${kind[$model]} \
    --set seed=0 --out "$OUT/$model"
done

curves=()
for model in $MODELS; do
  echo "== sweeps: $model"
  sweep=(--num "$NUM" --nfe "$NFE" --seed 11 --precision bf16)
  gdistill-sample "$OUT/$model" "${sweep[@]}" --sweep nucleus_p=0.6,0.7,0.8,0.9,1 --out "$OUT/sweeps/$model"
  curves+=("$model=$OUT/sweeps/$model")
  case $model in w*)
    gdistill-sample "$OUT/$model" "${sweep[@]}" --set decision=argmax --sweep tau=0.7,0.85,1,1.15 \
      --out "$OUT/sweeps/$model-argmax"
    curves+=("$model-argmax=$OUT/sweeps/$model-argmax")
    ;;
  esac
done
gdistill-eval frontier "${curves[@]}" --judge "$judge" --data "$OUT/store" --out "$OUT/frontier"

compared=()
for model in $MODELS; do
  echo "== validation, MAUVE, infilling: $model"
  gdistill-eval perplexity "$OUT/$model" "$OUT/store" --out "$OUT/perplexity/$model"
  # Of each sweep the setting whose entropy is nearest to the data's.
  samples="$OUT/sweeps/$model/nucleus_p=0.8"
  case $model in w*) samples="$OUT/sweeps/$model-argmax/tau=1.15" ;; esac
  gdistill-eval "$samples" --judge "$judge" --reference "$OUT/references.jsonl" --out "$OUT/scores/$model"
  compared+=("$model=$OUT/scores/$model")
  gdistill-sample "$OUT/$model" --infill "$OUT/infill.jsonl" --nfe "$NFE" --seed 11 --precision bf16 \
    --out "$OUT/filled/$model"
  gdistill-eval "$OUT/filled/$model" --infill "$OUT/infill.jsonl" --tokenizer "$OUT/$model/model" --judge "$judge"
done
gdistill-eval compare "${compared[@]}" --baseline "${BASELINE:-narrow}" --out "$OUT/comparison"

if [ -n "${QUESTIONS:-}" ]; then
  echo "== questions, by lm-evaluation-harness"
  gdistill-eval tasks "$QUESTIONS" --out "$OUT/tasks"
  tasks=$(basename -s .yaml "$OUT"/tasks/*.yaml | paste -sd,)
  for model in $MODELS; do
    gdistill-lm-eval --model gdistill --model_args pretrained="$OUT/$model" --include_path "$OUT/tasks" \
      --tasks "$tasks" --limit "${LIMIT:-200}" --output_path "$OUT/questions/$model"
  done
fi
echo "open $OUT/scores/*/report.html, $OUT/frontier, $OUT/comparison"
