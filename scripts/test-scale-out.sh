#!/usr/bin/env bash
# One batch, cut in every way: the texts must be the same for each id. Says which ways could not be tried here.
#
#   scripts/test-scale-out.sh [GEMMA] [RECORDS]     needs python3; GNU parallel and PySpark (with Java) where they are to be tried
set -euo pipefail
gemma=$(realpath "${1:-target/release/gemma}") records=${2:-60}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 - "$records" >in.jsonl <<'PY'
import json, sys
for n in range(int(sys.argv[1])):
    good = {"id": n, "prompt": f"Name {n} things that are blue.", "max_tokens": 12}
    print(json.dumps({"id": n} if n % 10 == 9 else good))
PY
options=(--seed 4 -q) # spark_batch.py says -q itself
"$gemma" generate --batch in.jsonl "${options[@]}" >one.jsonl
ways=()

for i in 1 2 3; do "$gemma" generate --batch in.jsonl --shard "$i/3" "${options[@]}" & done >shards.jsonl
wait
ways+=(shards)

"$gemma" generate --batch in.jsonl --parallel 8 "${options[@]}" >at-once.jsonl
cmp one.jsonl at-once.jsonl
ways+=(at-once)

if command -v parallel >/dev/null; then
  parallel --pipe -k -N "$((records / 4))" -j 2 "$gemma" generate --batch - "${options[@]}" <in.jsonl >parallel.jsonl
  cmp one.jsonl parallel.jsonl
  ways+=(parallel)
else
  echo "not tried: GNU parallel is not installed" >&2
fi

if python3 -c 'import pyspark' 2>/dev/null && command -v java >/dev/null; then
  spark() { python3 "$here/spark_batch.py" "$@" --partitions 4 --gemma "$gemma" -- --seed 4; }
  export SPARK_LOCAL_IP=127.0.0.1 PYSPARK_SUBMIT_ARGS='--master local[2] --conf spark.ui.enabled=false pyspark-shell'
  spark in.jsonl spark-out 2>spark.log || { tail -20 spark.log >&2; exit 1; }
  cat spark-out/part-* >spark.jsonl
  ways+=(spark)
  # A process that fails is an error of the job, never an empty result.
  if python3 "$here/spark_batch.py" in.jsonl failed-out --gemma "$gemma" -- -m /nonexistent 2>failed.log; then
    echo "a failing process went unnoticed" >&2
    exit 1
  fi
  grep -q 'exit.* 3' failed.log
else
  echo "not tried: PySpark (python3 -m pip install pyspark) or Java is not installed" >&2
fi

python3 - one "${ways[@]}" <<'PY'
import json, sys
read = lambda name: sorted((json.loads(line) for line in open(f"{name}.jsonl")), key=lambda r: r["id"])
one = read("one")
for name in sys.argv[2:]:
    assert [(r["id"], r["text"], r["error"]) for r in read(name)] == [(r["id"], r["text"], r["error"]) for r in one], name
    print(f"{name}: {len(one)} records, the same text for each id")
PY
