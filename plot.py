"""Draw held-out loss against steps, FLOPs and seconds, of run folders and of sweep results.

    python plot.py runs/tiny                                     # one run: runs/tiny.png
    python plot.py results/table.jsonl --kind=table              # final losses by optimizer and schedule
    python plot.py results/budgets.jsonl --kind=budgets --out=results/budgets.svg
"""
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import files
from configurator import configure
from sweep import DEFAULTS, read_results, result_of

KINDS = ("curves", "budgets", "table")
UNITS = {"steps": "optimizer steps", "flops": "FLOPs (model and Muon)", "seconds": "seconds of training"}


@dataclass
class PlotConfig:
    """What is drawn."""
    kind: str = "curves"            # curves; budgets: final losses against the runs' lengths; table: by two settings
    out: str | None = None          # .png or .svg; None: the first input's name as .png
    only: str | None = None         # labels to draw, with commas between; None: all
    recipe: str | None = None       # budgets: print what share of each other arm's steps this one needs
    rows: str = "optimizer"         # table: the setting that its rows differ in
    columns: str = "schedule"       # table: that of its columns
    top: float | None = None        # highest loss that is drawn; None: what all but the first tenth of a run needs

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is unknown; there are {', '.join(KINDS)}")
        if self.out and Path(self.out).suffix not in (".png", ".svg"):
            raise ValueError(f"out={self.out} must end in .png or .svg")


# --- what was run ----------------------------------------------------------------------------------------------------

def read(path):
    """The runs of a results file or of a run's folder, as sweep.py records them."""
    path = Path(path)
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise FileNotFoundError(f"results file {path} is missing")
        return read_results(path)
    if not (path / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{path} is neither a .jsonl of sweep.py nor a run's folder with a metrics.jsonl")
    return [result_of(path, path.name)]


def by_label(records):
    """{label: its runs} in the order in which the labels came."""
    arms = defaultdict(list)
    for record in records:
        arms[record["label"]].append(record)
    return dict(arms)


def best_of(runs):
    """Of the runs of one arm those that stand for it: for each length the settings with most seeds, and of several such
    those with the lowest mean loss. So trials of other learning rates do not count, however they came out."""
    kept = []
    for steps in sorted({r["steps"] for r in runs if r["val_loss"] is not None}):
        groups = defaultdict(list)
        for r in runs:
            if r["steps"] == steps and r["val_loss"] is not None:
                groups[json.dumps({**r["settings"], "seed": None}, sort_keys=True)].append(r)
        kept += min(groups.values(), key=lambda g: (-len(g), statistics.fmean(r["val_loss"] for r in g)))
    return kept


def per_step(runs, unit):
    """What one step of an arm costs: its median run's."""
    return statistics.median(r[unit] / r["steps"] for r in runs)


def mean_and_spread(values):
    """(mean, standard deviation of one run; 0 for a single one)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def finals(records):
    """[(steps, mean final loss, its spread, number of runs)] of an arm, by the length of its runs."""
    of = defaultdict(list)
    for record in best_of(records):
        of[record["steps"]].append(record["val_loss"])
    return [(steps, *mean_and_spread(losses), len(losses)) for steps, losses in sorted(of.items())]


def steps_to(points, loss):
    """How many steps an arm's runs need to end at `loss`, between runs of (steps, final loss) by straight lines in the
    logarithm of the steps; None where no two runs are on both sides of it."""
    points = sorted(points)
    for (n, above), (m, below) in itertools.pairwise(points):
        if above >= loss >= below and above > below:
            return math.exp(math.log(n) + (math.log(m) - math.log(n)) * (above - loss) / (above - below))
    return None


def needed(records, recipe):
    """What share of its steps, FLOPs and seconds the arm `recipe` needs to end where another arm ends.

    returns   a list of dicts: arm, steps, loss (mean of its runs), and share, share_flops, share_seconds with the
              spread over seeds of the first; a seed of the recipe is read against the other arm's mean
    """
    arms, rows = by_label(records), []
    if recipe not in arms:
        raise ValueError(f"no runs are labelled {recipe!r}; there are {', '.join(arms)}")
    seeds = defaultdict(list)
    for record in best_of(arms[recipe]):
        seeds[record["seed"]].append((record["steps"], record["val_loss"]))
    for label, runs in arms.items():
        for steps, loss, spread, _ in finals(runs) if label != recipe else ():
            need = [steps_to(points, loss) for points in seeds.values()]
            if all(need):
                share, share_spread = mean_and_spread([n / steps for n in need])
                rows.append({"arm": label, "steps": steps, "loss": loss, "spread": spread, "share": share,
                             "share_spread": share_spread, "seeds": len(need),
                             **{f"share_{name}": share * per_step(arms[recipe], name) / per_step(runs, name)
                                for name in ("flops", "seconds")}})
    return rows


# --- pictures --------------------------------------------------------------------------------------------------------

def draw_curves(pyplot, records, top):
    """Three panels: loss against steps, FLOPs and seconds, of each arm's longest runs; the mean over seeds, and a band
    from lowest to highest."""
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    arms, late = by_label(records), []
    for number, (label, runs) in enumerate(arms.items()):
        longest = max(r["steps"] for r in runs)
        runs = [r for r in best_of(runs) if r["steps"] == longest]
        seeds = defaultdict(list)
        for record in runs:
            for step, loss in record["curve"]:
                if step:
                    seeds[step].append(loss)
        steps = sorted(seeds)
        late += [loss for step in steps if step >= longest / 10 for loss in seeds[step]]
        for panel, unit in zip(panels, UNITS, strict=True):
            one = per_step(runs, unit)
            x, color = [step * one for step in steps], f"C{number % 10}"
            panel.plot(x, [statistics.fmean(seeds[s]) for s in steps], color=color, lw=1.5,
                       label=f"{label} ({len(runs)} seeds)" if len(runs) > 1 else label)
            panel.fill_between(x, [min(seeds[s]) for s in steps], [max(seeds[s]) for s in steps], color=color, alpha=.2,
                               lw=0)
    floors = {r["floor"] for r in records}
    for panel, name in zip(panels, UNITS.values(), strict=True):
        panel.set_xlabel(name)
        if len(floors) == 1 and min(floors) <= (top or max(late)):
            panel.axhline(min(floors), color="gray", ls=":", lw=1, label="frequencies alone")
    panels[0].set_ylabel("held-out loss, nats a token")
    panels[0].set_ylim(top=top or max(late))
    panels[0].legend(fontsize=8)
    return figure


def draw_budgets(pyplot, records, top):
    """Final loss of runs of several lengths, each at the end of its own schedule."""
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    for number, (label, runs) in enumerate(by_label(records).items()):
        points = finals(runs)
        for panel, unit in zip(panels, UNITS, strict=True):
            one = per_step(runs, unit)
            panel.errorbar([p[0] * one for p in points], [p[1] for p in points], [p[2] for p in points], marker="o",
                           ms=4, lw=1.5, capsize=2, color=f"C{number % 10}", label=label)
    for panel, name in zip(panels, UNITS.values(), strict=True):
        panel.set_xscale("log")
        panel.set_xlabel(name)
    lengths = sorted({r["steps"] for r in records})
    panels[0].set_xticks(lengths, [f"{n:,}" for n in lengths], fontsize=8, rotation=45)
    panels[0].minorticks_off()
    panels[0].set_ylabel("held-out loss at the end of the run")
    panels[0].set_ylim(top=top)
    panels[0].legend(fontsize=8)
    return figure


def table_of(records, rows, columns):
    """{row: {column: (mean, spread, seeds, failed runs)}} of final losses by two settings, each cell at the best of all
    others; of runs of several lengths the longest that all cells have."""
    cells = defaultdict(lambda: defaultdict(list))
    for record in records:
        row, column = (str(record["settings"].get(name, DEFAULTS[name])) for name in (rows, columns))
        cells[row][column].append(record)
    lengths = [{r["steps"] for r in runs if r["val_loss"] is not None} for line in cells.values()
               for runs in line.values()]
    lengths = [found for found in lengths if found]             # a cell whose runs have all failed has none
    longest = max(set.intersection(*lengths), default=None) if lengths else None
    table = defaultdict(dict)
    for row, line in cells.items():
        for column, runs in line.items():
            losses = [r["val_loss"] for r in best_of(runs) if longest is None or r["steps"] == longest]
            failed = sum(r["val_loss"] is None for r in runs)
            table[row][column] = (*(mean_and_spread(losses) if losses else (math.nan, math.nan)), len(losses), failed)
    return dict(table)


def draw_table(pyplot, table):
    """Cells with mean and spread, the darker the lower the loss."""
    columns = list(dict.fromkeys(c for line in table.values() for c in line))
    figure, axes = pyplot.subplots(figsize=(2.2 + 1.8 * len(columns), 1 + 0.8 * len(table)), layout="constrained")
    means = [[line[c][0] if c in line else math.nan for c in columns] for line in table.values()]
    axes.imshow(means, cmap="Blues_r", aspect="auto", alpha=0.6)
    for y, line in enumerate(table.values()):
        for x, column in enumerate(columns):
            axes.text(x, y, cell_text(line.get(column)), ha="center", va="center")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(table)), list(table))
    axes.set_title("held-out loss, mean ± standard deviation (seeds)", fontsize=9)
    return figure


def cell_text(cell):
    if cell is None:
        return "–"
    mean, spread, count, failed = cell
    return f"{mean:.4f} ± {spread:.4f} ({count})" + (f", {failed} failed" if failed else "")


# --- command line ----------------------------------------------------------------------------------------------------

def parse(argv):
    """(settings, inputs)"""
    inputs = [a for a in argv if not a.startswith("-")]
    cfg, = configure(PlotConfig, argv=[a for a in argv if a.startswith("-")],
                     also="   INPUT ...: run folders or .jsonl files of sweep.py")
    if not inputs:
        raise ValueError("name a run's folder or a .jsonl of sweep.py to draw; --help lists the settings")
    return cfg, inputs


def main(argv=None):
    cfg, inputs = parse(sys.argv[1:] if argv is None else list(argv))
    records = [record for path in inputs for record in read(path)]
    if cfg.only:
        wanted = cfg.only.split(",")
        known = by_label(records)
        if set(wanted) - set(known):
            raise ValueError(f"only={cfg.only}: there are runs labelled {', '.join(known)}")
        records = sorted((r for r in records if r["label"] in wanted), key=lambda r: wanted.index(r["label"]))
    if not records:
        raise ValueError(f"{inputs[0]} holds no results yet")
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("pictures need a package: pip install matplotlib") from None
    pyplot.rcParams["svg.hashsalt"] = "nanot5"                  # the same picture, the same file
    if cfg.kind == "table":
        table = table_of(records, cfg.rows, cfg.columns)
        for row, line in table.items():
            for column, cell in line.items():
                print(f"{row:<12} {column:<14} {cell_text(cell)}")
        figure = draw_table(pyplot, table)
    elif cfg.kind == "budgets":
        for row in needed(records, cfg.recipe) if cfg.recipe else ():
            print(f"{row['arm']}, {row['steps']:,} steps: {row['loss']:.4f} ± {row['spread']:.4f};"
                  f" {cfg.recipe} needs {row['share']:.3f} ± {row['share_spread']:.3f} of the steps,"
                  f" {row['share_flops']:.3f} of the FLOPs, {row['share_seconds']:.3f} of the seconds")
        figure = draw_budgets(pyplot, records, cfg.top)
    else:
        figure = draw_curves(pyplot, [r for r in records if r["val_loss"] is not None], cfg.top)
    out = Path(cfg.out or Path(inputs[0]).with_suffix(".png"))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(f"{out}: {len(records)} runs")
    return 0


if __name__ == "__main__":
    files.run(main)
