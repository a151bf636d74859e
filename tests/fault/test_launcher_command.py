"""run.launcher with commands that fail.
ctest: timeout 120
"""
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

STEPS = ["train.global_batch=24", "train.steps=6"]


class Commands(program.ProgramTest):
    def script(self, text, end='exec "$@"'):
        """The command gets the number of ranks and the hosts."""
        name = self.write("start", f'ranks=$1 hosts=$2; shift 2\necho "$ranks $hosts" >> starts\n{text}\n{end}\n')
        return f"run.launcher=sh {name} {{ranks}} '{{hosts}}'"

    def starts(self):
        with open(self.path("starts"), encoding="utf-8") as file:
            return file.read().splitlines()

    def test_fewer_ranks_than_hosts_take(self):
        """A rank fails again and again, and the hosts limit the number of ranks already."""
        self.write("hosts", "alpha slots=2\nbeta slots=2\n")
        command = self.script('[ $ranks -lt 4 ] || { echo "quadrille: a rank was lost" >&2; exit 1; }')
        result = self.ok(self.run_program(*self.small(*STEPS, "run.dir=run", "--restarts", "9", "run.elastic=1..8", "run.hosts=hosts",
                                                      command)))
        self.assertEqual(self.starts(), 3 * ["4 alpha:2,beta:2"] + ["3 alpha:2,beta:1"])
        self.assertIn("a rank fails again and again: the run continues with 3 ranks instead of 4", result.stdout)


if __name__ == "__main__":
    unittest.main()
