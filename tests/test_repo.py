"""The tree itself: who imports whom, and that every config loads."""
import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

import bench
import finetune
import plot
import prepare
import sample
import score
import sources
import sweep
import tasks
import train
from configurator import configure

ROOT = Path(__file__).resolve().parent.parent
BASE = {"configurator", "distributed", "files", "kernels", "model", "data", "optim", "runtime"}
ALLOWED = {"model": {"kernels"}, "optim": {"kernels"}, "runtime": {"distributed", "files", "kernels"},
           "distributed": {"files"},
           "sources": {"files"}, "prepare": {"configurator", "data", "files", "sources"},
           "tasks": {"data"}, "score": {"files", "tasks"}, "train": BASE | {"prepare"},
           "finetune": BASE | {"score", "tasks"}, "bench": BASE, "sample": BASE,
           "sweep": {"configurator", "files", "runtime", "train"}, "plot": {"configurator", "files", "sweep"}}
CLASSES = {"train": (train.TrainConfig, train.DataConfig, train.OptimConfig, train.T5Config),
           "finetune": (finetune.FinetuneConfig, tasks.TaskConfig, score.ScoreConfig, finetune.FinetuneOptim,
                        finetune.ModelConfig),
           "prepare": (prepare.PrepareConfig, sources.SourceConfig),
           "bench": (bench.BenchConfig, train.DataConfig, train.OptimConfig, train.T5Config)}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_imports_go_one_way():
    files = {path.stem: path for path in ROOT.glob("*.py")}
    assert set(files) >= BASE | {"train", "prepare"}
    for name, path in files.items():
        ours = set(imports(path)) & set(files)
        assert ours <= ALLOWED.get(name, set()), f"{name}.py imports {ours}"
    for path in (ROOT / "config").glob("*.py"):
        assert not set(imports(path)) & set(files)


def test_training_from_token_files_needs_torch_and_numpy_alone():
    known = set(sys.stdlib_module_names) | {"torch", "numpy", "tasks", "score"} | BASE
    for name in sorted(BASE | {"train", "finetune", "tasks", "score"}):
        tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
        at_top = {n.split(".")[0] for node in tree.body for n in
                  ([a.name for a in node.names] if isinstance(node, ast.Import)
                   else [node.module] if isinstance(node, ast.ImportFrom) else [])}
        assert at_top <= known, (name, at_top)


CONFIGS = sorted(p.name for p in (ROOT / "config").glob("*.py"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_and_says_how_to_run_it(name):
    path = ROOT / "config" / name
    script = "finetune" if name.startswith("finetune") else "train"
    argv = ["--model=random"] * (script == "finetune") + [str(path)]
    configure(*CLASSES[script], argv=argv)
    head = path.read_text(encoding="utf-8").splitlines()[:8]
    assert head[0].startswith(f"# config/{name}: ")
    words = [line.split()[1] for line in head[1:] if line.startswith("# ")]
    assert [word for word in words if word in ("run", "needs", "gives")] == ["run", "needs", "gives"]


README = re.findall(r"(?:^    |&& )(?:python|torchrun(?: --\S+)*) (\w+)\.py (.+)$",
                    (ROOT / "README.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("script, arguments", README)
def test_every_command_of_the_readme_is_understood(script, arguments):
    """Its config files are there and its settings exist, with values of their types."""
    argv = [str(ROOT / a) if a.endswith(".py") else a for a in shlex.split(arguments, comments=True)]
    parse = {"sample": sample.parse, "sweep": sweep.parse, "plot": plot.parse}.get(script)
    assert argv and (parse(argv) if parse else configure(*CLASSES[script], argv=argv))


def test_the_papers_default_is_nanot5s():
    files = [str(ROOT / "config" / "nanot5_base.py")]
    cfg, data_cfg, optim_cfg, t5_cfg = configure(*CLASSES["train"], argv=files)
    assert (cfg.max_steps, cfg.batch_size, optim_cfg.warmup_steps, optim_cfg.grad_clip) == (65_536, 128, 10_000, 1.0)
    assert (optim_cfg.optimizer, optim_cfg.learning_rate, optim_cfg.schedule) == ("adamwscale", 0.02, "cosine")
    assert (optim_cfg.final_lr, optim_cfg.warmup_start, optim_cfg.weight_decay) == (1e-5, 0.5, 0.0)
    assert (optim_cfg.beta1, optim_cfg.beta2, optim_cfg.eps) == (0.9, 0.999, 1e-6)
    assert (t5_cfg.init, t5_cfg.dropout, t5_cfg.tied, t5_cfg.gated) == ("nanot5", 0.0, False, True)
    assert (t5_cfg.d_model, t5_cfg.d_ff, t5_cfg.n_head, t5_cfg.n_layer) == (768, 2048, 12, 12)
    assert (data_cfg.input_length, data_cfg.noise_density, data_cfg.mean_span) == (512, 0.15, 3.0)


@pytest.mark.parametrize("hours, steps, warmup", [
    (4, 13_333, 1_666), (8, 26_666, 3_332), (12, 39_999, 5_000), (16, 53_332, 6_666), (20, 66_665, 8_332),
    (24, 79_998, 10_000)])
def test_budgets_are_nanot5s(hours, steps, warmup):
    """nanoT5/configs/task/pt_*h.yaml: batch 256."""
    files = [str(ROOT / "config" / name) for name in ("t5_base.py", f"budget_{hours}h.py")]
    cfg, _, optim_cfg, _ = configure(*CLASSES["train"], argv=files)
    assert (cfg.max_steps, optim_cfg.warmup_steps, cfg.batch_size) == (steps, warmup, 256)


def test_the_papers_fine_tuning_is_nanot5s():
    """nanoT5/configs/task/ft.yaml and what its code does with it."""
    argv = ["--model=random", str(ROOT / "config" / "finetune_sni.py")]
    cfg, task_cfg, _, optim_cfg, t5_cfg = configure(*CLASSES["finetune"], argv=argv)
    assert (cfg.batch_size, cfg.epochs, cfg.max_steps, cfg.bucket_batches) == (8, 2, None, 1)
    assert (optim_cfg.optimizer, optim_cfg.learning_rate, optim_cfg.schedule) == ("adamw_hf", 5e-5, "constant")
    assert (optim_cfg.warmup_steps, optim_cfg.grad_clip, optim_cfg.weight_decay, optim_cfg.eps) == (0, 0, 0, 1e-6)
    assert (t5_cfg.dropout, task_cfg.max_source_length, task_cfg.max_target_length) == (0, 1024, 128)
    assert (task_cfg.add_task_definition, task_cfg.num_pos_examples, task_cfg.num_neg_examples) == (True, 2, 0)
    assert (task_cfg.add_explanation, task_cfg.add_task_name, task_cfg.tk_instruct) == (False, False, False)
    assert task_cfg.max_num_instances_per_task == task_cfg.max_num_instances_per_eval_task == 100
    assert (task_cfg.prompt_style, task_cfg.eos_on_cut_target) == ("nanot5", True)
