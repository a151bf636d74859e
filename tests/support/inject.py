"""Runs the program with tests/fault/inject.c, which makes its nth allocation or file call fail."""
import os
import shutil
import subprocess

import program

COMPILER = shutil.which("cc")
SOURCE = os.path.join(program.SOURCE, "tests", "fault", "inject.c")
MISSING = "needs a C compiler and a program without sanitizers"
POSSIBLE = COMPILER is not None and not program.SANITIZED


class InjectTest(program.ProgramTest):
    seconds = 20.0  # that a run of milliseconds may take with a failure

    def setUp(self):
        super().setUp()
        self.library = self.path("inject.so")
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", self.library, SOURCE, "-ldl"], check=True)

    def inject(self, arguments, what, *, rank="launcher", at=0, only=False, path="", calls="", count="count", stacks=None):
        """The finished program, and the number of calls that could have failed. stacks: a file for the
        first allocations of each call stack."""
        count = self.path(count)
        if os.path.exists(count):
            os.remove(count)
        environment = {"LD_PRELOAD": self.library, "INJECT_WHAT": what, "INJECT_RANK": str(rank), "INJECT_AT": str(at),
                       "INJECT_COUNT": count, **({"INJECT_ONLY": "1"} if only else {}), **({"INJECT_PATH": path} if path else {}),
                       **({"INJECT_CALLS": calls} if calls else {}), **({"INJECT_STACKS": stacks} if stacks else {})}
        result = self.run_program(*arguments, environment=environment, timeout=self.seconds)
        calls = 0
        if os.path.exists(count):
            with open(count, encoding="ascii") as file:
                calls = max([0, *map(int, file)])
        return result, calls
