#!/bin/bash
# The study that README and LOG.md (2026-12-02) report: about three hours on 2 cores, two parts at a time.
#     bash results/study.sh table & bash results/study.sh recipe && bash results/study.sh baselines; wait
# Needs data/study (config/study.py says how it is made). Every part adds to results/study.jsonl what is not there yet.
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1
part=$1

arm() { python sweep.py config/study.py --results=results/study.jsonl --runs="runs/study_$part" --label="$1" "${@:2}" || exit; }

# What the study ended with; seed, length and warm-up (5 %) follow
recipe="--init=t5x --optimizer=muon --muon_lr=1e-2 --muon_momentum=0.8 --normuon=True --learning_rate=4e-2
        --schedule=linear --warmup_start=0 --beta2=0.98"

table() {       # the paper's table and plain AdamW: one seed of each rate, then all seeds of the best
    arm "adamwscale, cosine" --learning_rate=2e-2,4e-2,8e-2
    arm "adamwscale, inverse sqrt" --schedule=inverse_sqrt --learning_rate=1e-2,2e-2,4e-2,8e-2
    arm "adafactor, cosine" --optimizer=adafactor --learning_rate=1e-2,2e-2,4e-2,8e-2
    arm "adafactor, inverse sqrt" --optimizer=adafactor --schedule=inverse_sqrt --learning_rate=5e-3,1e-2,2e-2,4e-2
    arm "adamw, cosine" --optimizer=adamw --learning_rate=1e-3,2e-3,4e-3,2e-2
    arm "adamwscale, cosine" --learning_rate=4e-2 --seed=0,1,2
}

baselines() {   # nanoT5's exact recipe and the same with the head's initialisation right, at longer budgets
    arm "head right" --init=t5x --learning_rate=2e-2,4e-2,8e-2
    for n in 2500 3500 5000; do
        for init in nanot5 t5x; do
            label="adamwscale, cosine"; [ $init = t5x ] && label="head right"
            arm "$label" --init=$init --learning_rate=4e-2 --max_steps=$n --warmup_steps=$((n * 15 / 100)) --seed=0,1,2
        done
    done
}

recipe() {      # the recipe at the lengths that it needs
    for n in 700 1000 1400 2000 2800; do
        arm "recipe" $recipe --max_steps=$n --warmup_steps=$((n / 20)) --seed=0,1,2
    done
}

"$@"
