"""Train over a grid of settings and seeds, one run after another; each result becomes a line of one JSONL file.

    python sweep.py config/tiny.py --learning_rate=1e-2,2e-2,4e-2 --seed=0,1,2 --results=results/rates.jsonl
    python plot.py results/rates.jsonl

Values with commas between make the grid; all other settings go to every run. A sweep that was stopped goes on when it
is started again: results that are there are not made anew, and a run that was stopped is resumed.
"""
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import files
import runtime
import train
from configurator import configure


@dataclass
class SweepConfig:
    """The sweep."""
    results: str = "results/sweep.jsonl"    # where each run's line goes
    label: str | None = None        # what the arm is called in tables and pictures; None: the values that vary
    runs: str = "runs/sweep"        # a folder for each run, while it runs
    keep_runs: bool = False         # leave the runs' folders, with their checkpoints
    jobs: int = 1                   # runs at a time, which share the processor's cores

    def __post_init__(self):
        if self.jobs < 1:
            raise ValueError(f"jobs={self.jobs} must be at least 1")


TRAIN = (train.TrainConfig, train.DataConfig, train.OptimConfig, train.T5Config)
DEFAULTS = {f.name: f.default for cls in TRAIN for f in fields(cls)}


def grid(argv):
    """["a.py", "--x=1,2", "--y=3"] -> [(["a.py", "--x=1", "--y=3"], "x=1"), (["a.py", "--x=2", "--y=3"], "x=2")]:
    the command line of each run, and the values that tell it from the others, without the seed."""
    choices = []
    for arg in argv:
        name, equals, values = arg.partition("=")
        choices.append([f"{name}={value}" for value in values.split(",")] if equals else [arg])
    varied = [i for i, choice in enumerate(choices) if len(choice) > 1 and not choice[0].startswith("--seed=")]
    return [(list(run), " ".join(run[i][2:] for i in varied)) for run in itertools.product(*choices)]


def settings_of(argv):
    """The settings of a run that its losses depend on and that are not the defaults."""
    return {name: value for config in configure(*TRAIN, argv=argv) for name, value in asdict(config).items()
            if value != DEFAULTS[name] and name not in runtime.FREE}


def read_results(path):
    """The lines of a results file; one that was cut off is left out."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(runtime.parsed, lines) if "settings" in record]


def result_of(folder, label, settings=None, error=None):
    """What is kept of a run: its held-out losses, what they cost, and what made them. settings: None for all."""
    lines = [runtime.parsed(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    looks = [line for line in lines if "val_loss" in line and "flops" in line]
    if not looks:
        raise ValueError(f"{folder} has no evaluation yet, or its metrics.jsonl is of a version that kept no FLOPs")
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    last, every = looks[-1], about["settings"]
    record = {"label": label, "settings": every if settings is None else settings, "seed": every["seed"],
              "steps": last["step"], "val_loss": round(last["val_loss"], 5), "floor": round(last["floor"], 4),
              "flops": last["flops"], "seconds": round(last["seconds"], 2),
              "curve": [[x["step"], round(x["val_loss"], 4)] for x in looks],
              **{name: about[name] for name in ("commit", "torch", "processor", "threads", "gpus", "started")}}
    return {**record, "val_loss": None, "error": error} if error else record


def run_one(cfg, argv, label, settings, stop):
    """Train once; returns what is kept of it, or None if it was stopped, as it is by the signal that `stop` may get. A
    run that fails by itself, as one whose loss is no number any more, is a result too."""
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(cfg.runs) / name
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *argv, f"--out_dir={folder}",
               "--resume=True" if (folder / "ckpt.pt").exists() else "--overwrite=True"]
    env = os.environ | ({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // cfg.jobs))} if cfg.jobs > 1 else {})
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        while process.poll() is None:
            time.sleep(0.2)
            if stop.received:                   # handed on: a signal may reach the sweep alone
                process.send_signal(signal.SIGTERM)
                process.wait()
        code = process.returncode
    if code < 0 or code >= 128:
        return None
    last = (folder / "log.txt").read_text(encoding="utf-8").strip().split("\n")[-1]
    if code and not (folder / "metrics.jsonl").exists():
        raise files.Stopped(f"{' '.join(command[1:])} failed: {last}")
    record = result_of(folder, label, settings, last if code else None)
    if not cfg.keep_runs:
        shutil.rmtree(folder)
    return record


def parse(argv):
    """The sweep's settings, and (command line, what varies, settings) of each of its runs."""
    own = {f"--{f.name}" for f in fields(SweepConfig)}
    if "--help" in argv or "-h" in argv:
        configure(SweepConfig, *TRAIN, argv=["--help"])
    cfg, = configure(SweepConfig, argv=[a for a in argv if a.partition("=")[0] in own])
    return cfg, [(run, varied, settings_of(run))
                 for run, varied in grid([a for a in argv if a.partition("=")[0] not in own])]


def main(argv=None):
    cfg, runs = parse(sys.argv[1:] if argv is None else list(argv))
    results = Path(cfg.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    done = [record["settings"] for record in read_results(results)]
    left = [run for run in runs if run[2] not in done]
    print(f"{len(runs)} runs, {len(runs) - len(left)} of them in {results} already", flush=True)
    start = time.perf_counter()

    def work(item):
        number, (run, varied, settings) = item
        record = None if stop.received else run_one(cfg, run, cfg.label or varied, settings, stop)
        if record is None:
            if not stop.received:
                raise files.Stopped(f"the run {' '.join(run)} was stopped from outside; start the same sweep again")
            return
        with open(results, "a", encoding="utf-8") as file:      # one write: lines of several jobs do not mix
            file.write(json.dumps(record) + "\n")
        left_s = (time.perf_counter() - start) / number * (len(left) - number)
        told = record.get("error") or f"held-out loss {record['val_loss']:.4f}"
        print(f"{number}/{len(left)} {cfg.label or ''} {varied} seed={record['seed']}: {told} after"
              f" {record['steps']:,} steps, {runtime.duration(record['seconds'])} |"
              f" ETA {runtime.duration(left_s)}", flush=True)

    with runtime.StopSignal() as stop, ThreadPoolExecutor(cfg.jobs) as pool:
        for _ in pool.map(work, enumerate(left, 1)):
            pass
    if stop.received:
        print("stopped; start the same sweep again to go on")
        return 128 + stop.received
    return 0


if __name__ == "__main__":
    files.run(main)
