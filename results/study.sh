#!/bin/bash
# The study that README and LOG.md (2026-12-02) report: a few hours on 2 cores, two parts at a time.
#     bash results/study.sh table & bash results/study.sh baselines; bash results/study.sh recipe ...
# Needs data/study (config/study.py says how it is made). Every part adds to results/study.jsonl what is not there yet.
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
part=$1

arm() { python sweep.py config/study.py --results=results/study.jsonl --runs=runs/study_$part --label="$1" "${@:2}"; }

table() {       # the paper's table, and plain AdamW: each with its own rate of at least three, then two more seeds
    arm "adamwscale, cosine" --learning_rate=2e-2,4e-2,8e-2
    arm "adamwscale, inverse sqrt" --schedule=inverse_sqrt --learning_rate=1e-2,2e-2,4e-2
    arm "adafactor, cosine" --optimizer=adafactor --learning_rate=1e-2,2e-2,4e-2
    arm "adafactor, inverse sqrt" --optimizer=adafactor --schedule=inverse_sqrt --learning_rate=5e-3,1e-2,2e-2
    arm "adamw, cosine" --optimizer=adamw --learning_rate=1e-3,2e-3,4e-3,2e-2
}

"$@"
