"""Fine-tuning as an experiment, and its files for GLUE's server; the jobs are in finetune.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.checkpoints.remote import check_exists
from src.errors import UserError
from src.files import LATEST
from src.glue.examples import DIAGNOSTIC, check_sources, digest, read_task
from src.glue.tasks import FROM_MNLI, GLUE, FinetuneConfig, Task, select
from src.jobs import predictions
from src.jobs.experiment import RESULT_FILE, Average, Experiment, Job, Result, Row

if TYPE_CHECKING:
    from src.glue.finetune import Start

# For the GLUE server: file names by task, and one that it also requires.
FILES = {"cola": ("CoLA",), "sst2": ("SST-2",), "mrpc": ("MRPC",), "stsb": ("STS-B",),
         "mnli": ("MNLI-m", "MNLI-mm", DIAGNOSTIC), "qnli": ("QNLI",), "rte": ("RTE",), "qqp": ("QQP",)}  # fmt: skip
NOT_OURS = "WNLI"


class GlueExperiment(Experiment):
    """Every task with every seed."""

    command = "glue.py"
    example = "yamls/finetune-glue/lion-s-base.yaml tasks_to_run=[sst2,rte]"
    schema = FinetuneConfig
    preload = "src.glue.finetune"
    averages = (Average("glue", "GLUE average", {task.name: task.title for task in GLUE.values()}),)

    def check_paths(self) -> None:
        config = self.config
        self.costs: dict[str, int] = {}  # characters that an epoch reads, by task
        self.kept: dict[str, Any] = {}  # where tokens.py keeps the tokens, by task
        tasks = select(config.tasks_to_run, config.tasks, config.default_seed, config.seeds)
        default = config.max_seq_len
        self.tasks = [replace(t, max_seq_len=default if t.max_seq_len is None else t.max_seq_len) for t in tasks]
        for task, given in zip(self.tasks, tasks):
            if task.max_seq_len < (least := 2 * len(task.columns) + 1):
                place = "" if given.max_seq_len is None else f"tasks.{task.name}."
                wanted = f"must be at least {least}: [CLS], two tokens per text"
                raise UserError(f"{place}max_seq_len={task.max_seq_len} {wanted}")
        if config.mnli_first and [task.name for task in self.tasks].count("mnli") != 1:
            raise UserError("mnli_first needs one MNLI encoder; add mnli to tasks_to_run, without a search")
        path = config.starting_checkpoint_load_path
        if path is None and config.tokenizer_name is None:
            raise UserError("starting_checkpoint_load_path is not set; set it, or tokenizer_name for random weights")
        check_exists(path, "starting_checkpoint_load_path")
        check_sources(self.tasks, config.glue_dir, config.predict_test)

    def check_sections(self) -> None:
        super().check_sections()
        if self.config.starting_checkpoint_load_path is not None:  # main.py tries its finetune_eval without one
            self.start()

    def start(self) -> "Start":
        """Return what the jobs start from. Raises UserError if it cannot be read or its weights do not fit."""
        from src.glue.finetune import build_model, read_start

        longest = max(self.tasks, key=lambda task: task.max_seq_len)
        try:
            start = read_start(self.config, max_seq_len=longest.max_seq_len)
        except UserError as error:
            if longest.max_seq_len > self.config.max_seq_len and str(error).startswith("max_seq_len="):
                raise UserError(f"tasks.{longest.name}.{error}") from None
            raise
        build_model(start, replace(self.tasks[0], labels=self.tasks[0].labels or ("a", "b")))
        self.start_name, self.tokenizer = start.name, start.tokenizer
        return start

    def plan(self, device: str) -> list[Job]:
        super().check_sections()
        return self.jobs(self.start().digest(), device)

    def jobs(self, start: dict[str, Any], device: str) -> list[Job]:
        """Return one job per task and seed with all that its result depends on; if that changes, it runs again."""
        config = self.config
        digests = {task.name: digest(task, config.glue_dir, config.predict_test) for task in self.tasks}
        self.test_data = {name: data.pop("test", None) for name, data in digests.items()}

        def job(task: Task, seed: int, after: Job | None = None) -> Job:
            depends = {"data": digests[task.name], "start": after.settings if after else start}
            return self.job(task, seed, device, after, max_seq_len=task.max_seq_len, **depends)

        mnli = next((job(t, t.seeds[0]) for t in self.tasks if t.name == "mnli" and config.mnli_first), None)
        return [job(task, seed, mnli if task.name in FROM_MNLI else None) for task in self.tasks for seed in task.seeds]

    def cost(self, job: Job) -> int:
        from src.glue import tokens

        name = job.task.name
        if name not in self.costs:
            data = read_task(job.task, self.config.glue_dir, self.config.predict_test)
            self.costs[name] = sum(16 + sum(map(len, example.texts)) for example in data.train)
            file = Path(self.config.tokens_folder or self.folder / "tokens", f"{name}.safetensors")
            self.kept[name] = tokens.keep(data, self.tokenizer, self.config, file)
        return job.task.epochs * self.costs[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "tokenizer"}  # a job loads its own

    def run(self, job: Job, device: str, steps: Any) -> Result:
        from src.glue.finetune import finetune

        result = finetune(self.config, job, device, steps, self.keeps_checkpoint(job), self.kept[job.task.name])
        return {**result, "test_data": self.test_data[job.task.name]}

    def keeps_checkpoint(self, job: Job) -> bool:
        config = self.config
        return config.save_finetuned_checkpoints or (config.mnli_first and job.task.name == "mnli")

    def files(self, job: Job, result: Result) -> list[str] | None:
        if self.config.predict_test and result["test_data"] != self.test_data[job.task.name]:
            return None
        predicted = [predictions.file_name(split) for split in (*result["scores"], *result["test_splits"])]
        return predicted + [LATEST] * self.keeps_checkpoint(job)

    def origin(self, settings: dict[str, Any]) -> Any:
        return self.origin(settings["start"]) if "start" in settings else settings  # with mnli_first, MNLI's

    def finish(self, rows: list[Row]) -> None:
        if self.config.predict_test and rows:
            print(write_submission(rows, self.folder))


def write_submission(rows: list[Row], run: Path) -> str:
    """Write run/submission/NAME.tsv from the best-scoring seed, and return a line that names the files still needed."""
    folder, written = run / "submission", set()
    folder.mkdir(exist_ok=True)
    for row in rows:
        task, job = row["task"], run / "jobs" / row["folders"][max(row["seeds"], key=row["seeds"].get)]
        result = json.loads((job / RESULT_FILE).read_text())
        files = FILES.get(task, tuple(f"{task}-{split}" for split in result["test_splits"]))
        for file, split in zip(files, result["test_splits"]):
            shown = [submitted(task, line["prediction"], result["labels"]) for line in predictions.read(job, split)]
            numbered = "".join(f"{index}\t{prediction}\n" for index, prediction in enumerate(shown))
            name = DIAGNOSTIC if split == DIAGNOSTIC else file
            (folder / f"{name}.tsv").write_text(f"index\tprediction\n{numbered}", encoding="utf-8")
            written.add(name)
    wanted = [*(file for task in GLUE for file in FILES[task]), NOT_OURS]
    missing = [f"{name}.tsv" for name in wanted if name not in written] if written & set(wanted) else []
    earlier = sorted(path.name for path in folder.glob("*.tsv") if path.stem not in {*written, NOT_OURS})
    needed = f"; the server also needs {', '.join(missing)}" if missing else ""
    return f"test sets    {folder}{needed}" + (f"; from earlier runs: {', '.join(earlier)}" if earlier else "")


def submitted(task: str, prediction: str | float, labels: list[str]) -> str:
    if task == "stsb":
        return f"{min(5.0, max(0.0, prediction)):.3f}"  # the range of STS-B's labels
    if task in ("cola", "sst2", "mrpc", "qqp"):
        return str(labels.index(prediction))
    # A tab or line break in a class name would start another cell or row.
    return str(prediction).translate({ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r"})
