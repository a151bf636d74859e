"""Completion in real shells on a terminal, and the manual pages."""
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>]|\][^\x07]*\x07)|[\r\x07]")
# What is typed, and what the shell makes of it. The program prints nothing for `--` alone.
COMPLETED = [
    ("quadrille tra\t", "quadrille train "),
    ("quadrille train --devi\t", "quadrille train --device "),
    ("quadrille train --device cu\t", "quadrille train --device cuda "),
    ("quadrille train train.prec\t", "quadrille train train.precision="),
    ("quadrille train train.precision=b\t", "quadrille train train.precision=bf16 "),
    ("quadrille train --model llama-sm\t", "quadrille train --model llama-small "),
    ("quadrille train model.preset=gpt2-t\t", "quadrille train model.preset=gpt2-tiny "),
    ("quadrille train corp\t", "quadrille train corpus.txt "),
    ("quadrille train data.path=corp\t", "quadrille train data.path=corpus.txt "),
    ("quadrille bench ker\t", "quadrille bench kernels "),
    ("quadrille help paral\t", "quadrille help parallel."),
    ("quadrille plan --cluster h100-eth\t", "quadrille plan --cluster h100-ethernet "),
    ("quadrille init llama-sm\t", "quadrille init llama-small "),
]


class Shell:
    """A shell on a terminal."""

    def __init__(self, folder, *command):
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            path = os.path.dirname(program.PROGRAM) + ":" + os.environ["PATH"]
            os.execve(command[0], command, {"PATH": path, "TERM": "xterm", "HOME": folder, "LC_ALL": "C.UTF-8", "PS1": "$ ", "INPUTRC": "/dev/null"})
        self.seen = ""

    def type(self, keys):
        os.write(self.terminal, keys.encode())

    def wait(self, text, seconds=20.0):
        """Reads until `text` appears; returns whether it did."""
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.1)[0]:
                try:
                    self.seen = ESCAPE.sub("", self.seen + os.read(self.terminal, 65536).decode(errors="replace"))
                    while "\x08" in self.seen:  # the cursor moves back, and the next character replaces one
                        self.seen = re.sub("[^\x08]?\x08", "", self.seen, count=1)
                except OSError:
                    break
        return text in self.seen

    def close(self):
        os.close(self.terminal)
        os.waitpid(self.process, 0)


@unittest.skipIf(program.SANITIZED, "the program is started for every key")
class Completion(program.ProgramTest):
    def check(self, shell, cases=tuple(COMPLETED)):
        try:
            for typed, completed in cases:
                shell.seen = ""
                shell.type(typed)
                # Blanks at the end may be drawn as cursor movements: what is typed next shows them.
                shell.type("@")
                self.assertTrue(shell.wait(completed + "@"), f"{typed!r}: {completed!r} is not in {shell.seen!r}")
                shell.type("\x15")  # clears the line
        finally:
            shell.type("\x15exit\n")
            shell.close()

    @unittest.skipUnless(shutil.which("bash"), "no bash")
    def test_bash(self):
        shell = Shell(self.folder, shutil.which("bash"), "--norc", "--noprofile", "-i")
        shell.type("source <(quadrille completion bash); echo rea''dy\n")
        self.assertTrue(shell.wait("ready"), shell.seen)
        self.check(shell)

    @unittest.skipUnless(shutil.which("zsh"), "no zsh")
    def test_zsh(self):
        shell = Shell(self.folder, shutil.which("zsh"), "-f", "-i")
        shell.type("unsetopt BEEP; autoload -U compinit && compinit -u -D && source <(quadrille completion zsh); echo rea''dy\n")
        self.assertTrue(shell.wait("ready"), shell.seen)
        self.check(shell)

    @unittest.skipUnless(shutil.which("zsh"), "no zsh")
    def test_zsh_finds_the_installed_file(self):
        os.mkdir(self.path("functions"))
        self.write("functions/_quadrille", self.ok(self.run_program("completion", "zsh")).stdout)
        shell = Shell(self.folder, shutil.which("zsh"), "-f", "-i")
        shell.type("unsetopt BEEP; fpath=($PWD/functions $fpath); autoload -U compinit && compinit -u -D; echo rea''dy\n")
        self.assertTrue(shell.wait("ready"), shell.seen)
        self.check(shell, COMPLETED[:3])

    def test_words(self):
        def words(*typed):
            lines = self.ok(self.run_program("completion", "words", "--", *typed)).stdout.splitlines()
            return [line.split("\t")[0] for line in lines]
        commands = [line.split()[1] for line in self.ok(self.run_program("help")).stdout.splitlines() if line.startswith("  quadrille ")]
        self.assertEqual(words(""), commands)
        self.assertEqual(words("train", "run.resum"), ["run.resume=", ":files"])
        self.assertEqual(words("train", "--resu"), ["--resume"])
        self.assertEqual(words("convert", "--dtype", ""), ["fp32", "bf16", "fp16"])
        self.assertIn("accelerator.memory_gib=", words("simulate", "accelerator."))
        self.assertNotIn("accelerator.memory_gib=", words("train", "accelerator."))
        self.assertEqual(words("nonsense", ""), [])
        self.one_line(self.run_program("completion"), 2, "bash or zsh")
        self.one_line(self.run_program("completion", "fish"), 2, "bash or zsh")


class Manual(program.ProgramTest):
    def test_pages(self):
        """Every command has a page; roff accepts all of them."""
        text = self.ok(self.run_program("help", "--man")).stdout
        commands = re.findall(r"(?m)^\.BR quadrille\\-(\w+) \(1\)$", text)
        self.assertGreater(len(commands), 14)
        keys = self.ok(self.run_program("help", "--man", "config")).stdout
        self.assertEqual(len(re.findall(r"(?m)^\.B .*(?:model|data|train|parallel|run|lora|dpo|fp8)\.\w+$", keys)),
                         self.ok(self.run_program("help", "--markdown")).stdout.count("\n| `"))
        for name in ["", "config", *commands]:
            page = self.ok(self.run_program("help", "--man", *([name] if name else []))).stdout
            self.assertTrue(page.isascii(), name)
            self.assertTrue(page.startswith('.TH "quadrille'), page[:40])
            if shutil.which("groff"):
                result = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=False)
                self.assertEqual((result.returncode, result.stderr), (0, ""), name)
        self.one_line(self.run_program("help", "--man", "pretrain"), 2, "quadrille train")


if __name__ == "__main__":
    unittest.main()
