#!/bin/bash
# The study that README and LOG.md (2026-12-02) report: about three hours on 2 cores, two parts at a time.
#     bash results/study.sh table & bash results/study.sh recipe && bash results/study.sh ideas; wait
# Needs data/study (config/study.py says how it is made). Every part adds to results/study.jsonl what is not there yet.
cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=1
part=$1

arm() { python sweep.py config/study.py --results=results/study.jsonl --runs="runs/study_$part" --label="$1" "${@:2}" || exit; }

muon="--init=t5x --optimizer=muon --muon_lr=1e-2 --learning_rate=4e-2 --schedule=linear --warmup_start=0 --beta2=0.98"
recipe="$muon --muon_momentum=0.8 --normuon=True --match_init=True --local_init=2"

table() {       # the paper's table and plain AdamW: one seed of each rate, then all seeds of the best
    arm "nanoT5 exact" --learning_rate=2e-2,4e-2,8e-2
    arm "nanoT5 exact" --learning_rate=4e-2 --seed=0,1,2
    arm "adamwscale inverse sqrt" --schedule=inverse_sqrt --learning_rate=1e-2,2e-2,4e-2,8e-2
    arm "adamwscale inverse sqrt" --schedule=inverse_sqrt --learning_rate=4e-2 --seed=0,1,2
    arm "adafactor cosine" --optimizer=adafactor --learning_rate=1e-2,2e-2,4e-2,8e-2
    arm "adafactor cosine" --optimizer=adafactor --learning_rate=4e-2 --seed=0,1,2
    arm "adafactor inverse sqrt" --optimizer=adafactor --schedule=inverse_sqrt --learning_rate=5e-3,1e-2,2e-2,4e-2
    arm "adafactor inverse sqrt" --optimizer=adafactor --schedule=inverse_sqrt --learning_rate=4e-2 --seed=0,1,2
    arm "adamw cosine" --optimizer=adamw --learning_rate=1e-3,2e-3,4e-3,2e-2
    arm "adamw cosine" --optimizer=adamw --learning_rate=2e-3 --seed=0,1,2
}

baselines() {   # nanoT5's exact recipe and the same with the head's initialisation right, at three lengths
    arm "head right" --init=t5x --learning_rate=2e-2,4e-2,8e-2
    for n in 2000 2500 4000; do
        length="--learning_rate=4e-2 --max_steps=$n --warmup_steps=$((n * 15 / 100)) --seed=0,1,2"
        arm "nanoT5 exact" $length
        arm "head right" --init=t5x $length
    done
}

recipe() {      # the recipe at the lengths that it needs
    for n in 500 700 1000 1400 2000; do
        arm "recipe" $recipe --max_steps=$n --warmup_steps=$((n / 20)) --seed=0,1,2
    done
    arm "recipe without the inits" $recipe --match_init=False --local_init=0 --warmup_steps=100 --seed=0,1,2
    arm "recipe other slopes" $recipe --max_steps=1000 --warmup_steps=50 --local_init=1,4
}

ideas() {       # one at a time on the right head, 1,000 steps; and how Muon's settings were chosen
    idea() { arm "head right: $1" --init=t5x --learning_rate=4e-2 --max_steps=1000 --warmup_steps=150 "${@:2}"; }
    idea "1,000 steps"
    idea "inits" --match_init=True --local_init=2
    idea "muon" --optimizer=muon --muon_lr=1e-2 --muon_momentum=0.8 --normuon=True
    idea "linear to 0 and warm-up from 0" --schedule=linear --warmup_steps=50 --warmup_start=0
    idea "beta2 .98" --beta2=0.98
    idea "match" --match_init=True
    idea "local" --local_init=2
    idea "z-loss" --z_loss=1e-4
    idea "noise .2" --noise_density=0.2 --eval_noise_density=0.15
    idea "average" --ema=0.99
    together() { arm "together: $1" $muon "${@:2}"; }
    together "muon" --warmup_steps=100
    together "normuon" --warmup_steps=100 --normuon=True
    together "muon momentum" --warmup_steps=100 --muon_momentum=0.6,0.8,0.9
    short="--max_steps=1500 --warmup_steps=75 --muon_momentum=0.8"
    together "muon momentum" $short
    together "muon rate" $short --muon_lr=2e-2
    together "normuon" $short --normuon=True
    together "normuon beta1" $short --normuon=True --beta1=0.5
    together "normuon embedding rate" $short --normuon=True --embedding_lr=0.01,0.16
    together "normuon zero_out" $short --normuon=True --zero_out=True
}

"$@"
