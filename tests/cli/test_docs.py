"""Every command of the documentation runs as printed and writes below runs/ only, every link and
path exists, and generated pages and drawings are up to date.

Commands are blocks fenced as ```sh, and table cells that consist of a command, in the pages of the
top folder and of docs. Those of a document run in order, in a scratch folder that looks like the
repository after `make build`. Targets of make must exist; other tests run them, but `make demo` is
replaced by a short run, `quadrille serve` is ended after two seconds, and `make install` is replaced
by an installation in the scratch folder, which later commands may use.
ctest: timeout 300
ctest: processors 2
"""
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

sys.path.insert(0, os.path.join(program.SOURCE, "tools"))
import architecture_map  # noqa: E402
import reference  # noqa: E402

CELL = re.compile(r"\|\s*`(quadrille [^`]+)`\s*(?=\|)")
PATH = re.compile(r"`((?:bench|data|docs|examples|include|src|tests|tools)/[\w./*-]+)`")
EXAMPLES = {"src/model/parallel.c"}  # the file that docs/adding-a-model.md tells the reader to write
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def commands(text):
    """The commands of all sh blocks and cells, each with its line number. A line that ends in a
    backslash continues; a block with a here-document is one command."""
    end = 0
    for match in FENCE.finditer(text):
        yield from cells(text, end, match.start())
        end = match.end()
        if match.group(1) != "sh":
            continue
        first = text.count("\n", 0, match.start(2)) + 1
        body = match.group(2)
        if "<<" in body:
            yield first, body
            continue
        pending, start = "", first
        for number, line in enumerate(body.splitlines(), first):
            if not pending:
                start = number
            pending += line + "\n"
            if line.endswith("\\"):
                continue
            if pending.strip() and not pending.lstrip().startswith("#"):
                yield start, pending.strip()
            pending = ""
    yield from cells(text, end, len(text))


# Whether the program has the web server.
SERVE = json.loads(program.ProgramTest.run_anywhere("doctor", "--json").stdout)["serve_built"]


def cells(text, begin, end):
    for match in CELL.finditer(text, begin, end):
        yield text.count("\n", 0, match.start()) + 1, match.group(1)


def make_targets():
    with open(os.path.join(program.SOURCE, "Makefile"), encoding="utf-8") as file:
        return set(re.findall(r"^([a-z][\w-]*):", file.read(), re.MULTILINE))


def documents():
    return [path for pattern in ("*.md", "docs/*.md", "docs/*/*.md")
            for path in sorted(glob.glob(os.path.join(program.SOURCE, pattern)))]


def anchors(path):
    """The names by which headings of a page can be linked to."""
    with open(path, encoding="utf-8") as file:
        headings = re.findall(r"^#+ (.*)$", FENCE.sub("", file.read()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def plain_environment():
    """The environment of a fresh container: without the variables that let Open MPI run as root."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}


class Docs(unittest.TestCase):
    def scratch(self):
        """Looks like the repository after `make build`."""
        folder = tempfile.mkdtemp(prefix="quadrille-test-docs-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        os.makedirs(os.path.join(folder, "build/release/bin"))
        os.symlink(program.PROGRAM, os.path.join(folder, "build/release/bin/quadrille"))
        shutil.copy(os.path.join(program.SOURCE, "README.md"), folder)
        shutil.copytree(os.path.join(program.SOURCE, "examples"), os.path.join(folder, "examples"))
        os.symlink(os.path.join(program.SOURCE, "data"), os.path.join(folder, "data"))
        return folder

    def check_make(self, command, where):
        for word in shlex.split(command, comments=True)[1:]:
            if "=" not in word and not word.startswith("-"):
                self.assertIn(word, make_targets(), f"{where}: make {word}: the Makefile has no such target")

    def install(self, prefix):
        """Installs there; returns the variables by which compilers and programs find it."""
        build = os.path.dirname(os.path.dirname(program.PROGRAM))
        subprocess.run(["cmake", "--install", build, "--prefix", prefix], check=True, capture_output=True)
        libraries = next(folder for folder, _, files in os.walk(prefix) if "libquadrille.a" in files)
        return {"PKG_CONFIG_PATH": os.path.join(libraries, "pkgconfig"), "LD_LIBRARY_PATH": libraries}

    def run_document(self, path):
        name = os.path.relpath(path, program.SOURCE)
        with open(path, encoding="utf-8") as file:
            found = list(commands(file.read()))
        folder = self.scratch() if found else ""
        before = set(os.listdir(folder)) if found else set()
        environment = {**plain_environment(), "PATH": os.path.join(folder, "build/release/bin") + ":" + os.environ["PATH"]}
        for line, command in found:
            where = f"{name}:{line}"
            if command.split()[0] == "make":
                self.check_make(command, where)
                if command.split()[1:2] == ["install"]:
                    environment.update(self.install(os.path.join(folder, "runs/installed")))
                if "demo" not in shlex.split(command, comments=True):
                    continue
                command = "quadrille train examples/demo.yaml train.steps=4 train.warmup=1"
            if command.split()[:2] == ["quadrille", "serve"]:
                if not SERVE:
                    continue
                command = f"timeout 2 {command} || [ $? = 124 ]"  # until it is ended
            if "mpirun" in command and not program.MPIRUN:
                continue
            begin = time.monotonic()
            result = subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=folder, env=environment, timeout=200,
                                    stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if b"this build has no UCX" in result.stderr:
                continue
            self.assertEqual(result.returncode, 0, f"{where}: {command}\n{result.stdout.decode(errors='replace')[-2000:]}"
                                                   f"{result.stderr.decode(errors='replace')[-2000:]}")
            print(f"{time.monotonic() - begin:6.1f} s  {where}", flush=True)
        left = set(os.listdir(folder)) - before - {"runs"} if found else set()
        self.assertFalse(left, f"{name}: its commands leave files that .gitignore does not list: {sorted(left)}")
        return len(found)

    def test_commands(self):
        total = 0
        for path in documents():
            with self.subTest(os.path.basename(path)):
                total += self.run_document(path)
        self.assertGreater(total, 10, "the documents have hardly any command: were the fences renamed?")

    def test_links(self):
        for path in documents():
            with open(path, encoding="utf-8") as file:
                text = FENCE.sub("", file.read())
            for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
                if "://" in target:
                    continue
                where = os.path.join(os.path.dirname(path), target) if target else path
                self.assertTrue(os.path.exists(where), f"{os.path.basename(path)}: {target} is not there")
                if anchor:
                    self.assertIn(anchor, anchors(where), f"{os.path.basename(path)}: {target} has no such heading")

    def test_paths(self):
        for path in documents():
            with open(path, encoding="utf-8") as file:
                text = FENCE.sub("", file.read())
            for named in set(PATH.findall(text)) - EXAMPLES:
                where = os.path.join(program.SOURCE, named)
                self.assertTrue(glob.glob(where) or glob.glob(where + ".c"), f"{os.path.basename(path)}: {named} does not exist")

    def test_configuration_reference(self):
        with open(reference.PAGE, encoding="utf-8") as file:
            self.assertEqual(file.read(), reference.page(program.PROGRAM),
                             "docs/configuration.md is not what the option table says: run tools/reference.py")

    def test_map(self):
        with open(architecture_map.FILE, encoding="utf-8") as file:
            self.assertEqual(file.read(), architecture_map.picture(),
                             "docs/images/architecture.svg is out of date: run tools/architecture_map.py")

    def test_demo(self):
        """A short demo, from another folder, and a second time over the first run."""
        folder = self.scratch()
        for _ in range(2):
            result = subprocess.run(["bash", os.path.join(folder, "examples/demo.sh"), "train.steps=4", "train.warmup=1"], cwd="/",
                                    env={**os.environ, "QUADRILLE": program.PROGRAM}, capture_output=True, timeout=200, check=False)
            text = result.stdout.decode(errors="replace")
            self.assertEqual((result.returncode, result.stderr), (0, b""), text[-2000:])
            for part in ("4 ranks", "per rank", "step 4/4", "trigram", "And God said", "--trace", "mpirun"):
                self.assertIn(part, text)
        self.assertTrue(os.path.exists(os.path.join(folder, "runs/demo/checkpoints/step-000000000004")))
        hints = [line for line in text.splitlines() if "  # " in line]
        self.assertGreater(len(hints), 4)
        for hint in hints:  # each hint is a complete command
            command = hint.split("  # ")[0]
            if " train " in command:
                command += " train.steps=2 train.warmup=1"
            if " verify " in command:
                command += " --steps 2 train.warmup=1"
            result = subprocess.run(["bash", "-c", command], cwd=folder, env=plain_environment(), timeout=200, stdin=subprocess.DEVNULL,
                                    capture_output=True, check=False)
            self.assertEqual(result.returncode, 0, f"{command}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")


if __name__ == "__main__":
    unittest.main()
