"""Random configurations: each is refused with one line before anything is written, with the same
message by `check`, by `train` on local ranks and as threads; or it is accepted by all of them and
runs. 20 by default; QUADRILLE_CONFIGURATIONS=10000 for the long form (QUADRILLE_FIRST=5000: from
this one on).
ctest: timeout 200
ctest: processors 2
"""
import concurrent.futures
import json
import os
import random
import re
import shutil
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

COUNT = int(os.environ.get("QUADRILLE_CONFIGURATIONS", "20"))
FIRST = int(os.environ.get("QUADRILLE_FIRST", "0"))
BASE = {"model.layers": "2", "model.hidden": "32", "model.heads": "4", "model.vocab": "300", "data.seq": "16", "train.global_batch": "8",
        "train.steps": "2", "run.threads": "1"}
# What these mean depends on files, devices or other machines, or they bound resources.
LEFT_OUT = r"^(run\.(dir|hosts|weights|from|resume|overwrite|launcher|backend|device|gpu|restarts|kernels|threads|deadline|ranks_as|tuning.*|save_.*)|" \
           r"data\..*path|data\.(tokenizer|mix|chat.*|format|template|hold.*)|.*_file|train\.steps|train\.epochs|eval\..*|sample\..*|model\.preset|" \
           r"lora\.(targets|path)|parallel\.nodes|.*\.eval.*)$"
LARGE = 1 << 28  # bytes and FLOP of a rank and step: accepted, not run


def options():
    """Type and limits of each key, from the reference that a test compares with the option tables."""
    keys = {}
    with open(os.path.join(program.SOURCE, "docs", "configuration.md"), encoding="utf-8") as file:
        for key, kind in re.findall(r"^\| `([a-z0-9_.]+)` \| [^|]*\| ([^|]*) \|", file.read(), re.MULTILINE):
            if not re.match(LEFT_OUT, key) and not key.startswith(("accelerator.", "network.", "software.", "node.", "cluster.", "processor.")):
                keys[key] = kind.strip()
    return keys


def draw(chance, kind):
    """A value: mostly small and plausible, sometimes a limit or nonsense."""
    if kind.startswith("one of: "):
        return chance.choice(kind[8:].split(", ")) if chance.random() < 0.98 else "nonsense"
    if kind == "true or false":
        return chance.choice(["true", "false"])
    if kind.startswith(("integer", "number")):
        low, high = (float(text) for text in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?", kind)[:2])
        if chance.random() < 0.08:
            return chance.choice([f"{low:g}", f"{high:g}", f"{low - 1:g}", f"{high + 1:g}"])
        if kind.startswith("integer"):
            return str(chance.choice([1, 2, 2, 3, 4, 4, 6, 8, 16, 32]))
        return f"{min(high, max(low, chance.choice([0.01, 0.1, 0.5, 1, 1, 2]) * chance.choice([1, 1, 0.3]))):g}"
    return chance.choice(["", "a", "2,1", "0.5"])


@unittest.skipIf(program.SANITIZED, "measures the program as it is used")
class Configurations(program.ProgramTest):
    def draw(self, number):
        chance, keys = random.Random(number), options()
        chosen = dict(BASE)
        if chance.random() < 0.35:
            chosen |= {"model.experts": "4", "model.experts_per_token": "2"}
        for key in chance.sample(sorted(keys), chance.randrange(1, 5)):
            chosen[key] = draw(chance, keys[key])
        for axis in chance.sample(["parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.zero", "parallel.etp"], chance.randrange(0, 4)):
            chosen[axis] = str(chance.choice([1, 2, 2, 3, 4]))
        chosen["parallel.ranks"] = str(chance.choice([1, 2, 2, 3, 4, 4, 6, 8]))
        return [f"{key}={value}" for key, value in chosen.items()]

    def attempt(self, number):
        """(what happened, what is wrong with it)"""
        arguments = self.draw(number)
        told = f"{number}: {' '.join(a for a in arguments if a.partition('=')[2] != BASE.get(a.partition('=')[0]))}: "
        folder = self.path(f"run{number}")
        data = [f"data.path={self.corpus}", f"run.dir={folder}"]
        checked = self.run_program("check", *arguments, *data, "--json")
        if checked.returncode not in (0, 2):
            return "crash", told + f"check: status {checked.returncode}: {checked.stderr}"
        if checked.returncode == 0:
            plan = json.loads(checked.stdout)
            if plan["memory_bytes_per_rank"] > LARGE or plan["flops_per_step"] > 16 * LARGE or plan["actions"] > 20000:
                return "large", None
        try:
            for ranks_as in ("processes", "threads"):
                result = self.run_program("train", *arguments, *data, "--ranks-as", ranks_as)
                if result.returncode == 2 and checked.returncode == 2:
                    if result.stderr != checked.stderr or result.stderr.count("\n") != 1:
                        return "refused", told + f"check says {checked.stderr}train, {ranks_as}: {result.stderr}"
                    if os.path.exists(folder):
                        return "refused", told + "a folder was written"
                elif result.returncode == 2:  # what only the data or this machine decide
                    if result.stderr.count("\n") != 1 or os.path.exists(f"{folder}/metrics.jsonl"):
                        return "refused", told + f"by train, {ranks_as}, not by check: {result.stderr}"
                    return "refused by train", None
                elif result.returncode == 1 and re.search("not (a )?finite", result.stderr):
                    return "not finite", None
                elif result.returncode != 0 or checked.returncode != 0:
                    return "fails", told + f"{ranks_as}: status {result.returncode}, check {checked.returncode}: {result.stderr}"
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return ("refused" if checked.returncode == 2 else "runs"), None

    def test_two_errors(self):
        """Of two errors both commands report the same one, wherever they are checked."""
        for number, words in enumerate((["run.host_check=a", "parallel.pp=3"], ["run.available=a", "parallel.ep=2"],
                                        ["run.elastic=2..3", "parallel.tp=3"], ["run.hosts=a", "run.restarts=2", "parallel.tp=3"])):
            arguments = [f"{key}={value}" for key, value in BASE.items()] + words + ["parallel.ranks=2", f"run.dir={self.path(f'two{number}')}"]
            checked = self.run_program("check", *arguments)
            self.one_line(checked, 2)
            self.assertEqual(self.run_program("train", *arguments, f"data.path={self.corpus}").stderr, checked.stderr)

    def test_long_lists(self):
        """Sequences whose list of ops would have millions of entries are refused at once; a tenth of that is accepted."""
        base = [f"{key}={value}" for key, value in BASE.items()] + ["parallel.tp=2", "parallel.ranks=2"]
        self.one_line(self.run_program("check", *base, "data.seq=100M", timeout=20), 2, "data.seq", "131072 pieces")
        self.ok(self.run_program("check", *base, "data.seq=10M", timeout=60))

    def test_random(self):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = list(pool.map(self.attempt, range(FIRST, FIRST + COUNT)))
        outcomes = [outcome for outcome, _ in results]
        failed = [text for _, text in results if text]
        print(", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes))) + f"; {len(failed)} failed", flush=True)
        self.assertEqual(failed, [], "\n".join(failed))


if __name__ == "__main__":
    unittest.main()
