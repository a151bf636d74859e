"""run.launcher with commands that fail: nothing of a replaced run is taken for the present one, no
failure for a success, and a wrong file of hosts ends no run.
ctest: timeout 120
"""
import os
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

STEPS = ["train.global_batch=24", "train.steps=6"]
ONCE = """[ -e tried ] || { touch tried; echo "quadrille: beta cannot be reached" >&2; exit 1; }
"""


class Commands(program.ProgramTest):
    def script(self, text, end='exec "$@"'):
        """The command gets the number of ranks and the hosts."""
        name = self.write("start", f'ranks=$1 hosts=$2; shift 2\necho "$ranks $hosts" >> starts\n{text}\n{end}\n')
        return f"run.launcher=sh {name} {{ranks}} '{{hosts}}'"

    def starts(self):
        with open(self.path("starts"), encoding="utf-8") as file:
            return file.read().splitlines()

    def test_replaced_run(self):
        """The first attempt fails before it has replaced the run in the folder, which is complete."""
        command = self.script(ONCE)
        self.ok(self.run_program(*self.small(*STEPS, "train.seed=2", "run.dir=whole")))
        self.ok(self.run_program(*self.small(*STEPS, "run.dir=run")))
        self.ok(self.run_program(*self.small(*STEPS, "train.seed=2", "run.dir=run", "--overwrite", "--restarts", "2", command)))
        self.assertEqual(self.numbers("run"), self.numbers("whole"))
        self.assertEqual([(line["event"], line.get("step"), line.get("resumes")) for line in self.journal()],
                         [("failure", None, None), ("restart", None, False)])

    def test_ignored_children(self):
        """Who has started the program ignores SIGCHLD."""
        command = self.script("", "exit 1")
        result = subprocess.run([program.PROGRAM, *self.small(*STEPS, "run.dir=run", "--restarts", "1", command)], cwd=self.folder,
                                capture_output=True, text=True, timeout=60, check=False,
                                preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertEqual(len(self.starts()), 2)

    def test_fewer_ranks_than_hosts_take(self):
        """A rank fails again and again, and the hosts limit the number of ranks already."""
        self.write("hosts", "alpha slots=2\nbeta slots=2\n")
        command = self.script('[ $ranks -lt 4 ] || { echo "quadrille: a rank was lost" >&2; exit 1; }')
        result = self.ok(self.run_program(*self.small(*STEPS, "run.dir=run", "--restarts", "9", "run.elastic=1..8", "run.hosts=hosts",
                                                      command)))
        self.assertEqual(self.starts(), 3 * ["4 alpha:2,beta:2"] + ["3 alpha:2,beta:1"])
        self.assertIn("a rank fails again and again: the run continues with 3 ranks instead of 4", result.stdout)

    def test_wrong_hosts(self):
        """The file of hosts gets a wrong line while the run uses it."""
        self.write("hosts", "alpha slots=2\n\nbeta slots=2\ngamma slots=2\n")
        command = self.script('[ -e tried ] || printf "alpha slots=2\\n\\nbeta slots=x\\n" > hosts\n' + ONCE)
        result = self.ok(self.run_program(*self.small(*STEPS, "run.dir=run", "--restarts", "2", "run.elastic=1..6", "run.hosts=hosts",
                                                      command)))
        self.assertEqual(self.starts(), 2 * ["6 alpha:2,beta:2,gamma:2"])
        self.assertIn("run.hosts: hosts, line 3: 'slots=x' must be slots=N, how many ranks the host takes: hosts stay as they were",
                      result.stdout)

    def test_blamed_host_that_does_not_answer(self):
        """A command that takes long to end after a host has failed: hosts are asked meanwhile."""
        self.write("hosts", "alpha slots=4\nbeta slots=4\n")
        command = self.script('touch gone; echo "process rank 1 with PID 7 on node beta exited on signal 9" >&2; sleep 13', "exit 1")
        result = self.run_program(*self.small(*STEPS, "run.dir=run", "--restarts", "2", "run.elastic=6..8", "run.hosts=hosts",
                                              "run.host_check=[ {host} = alpha ] || [ ! -e gone ]", "run.host_failures=1", command))
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertEqual([line["event"] for line in self.journal()], ["absent", "excluded", "failure"])
        self.assertEqual(result.stdout.count("4 ranks are available, and run.elastic needs at least 6"), 1, result.stdout)

    def test_first_host_of_a_line(self):
        """A message names the host of the missing rank, then others."""
        self.write("hosts", "alpha slots=2\nbeta slots=2\n")
        command = self.script('case $hosts in *beta*) echo "quadrille: rank 2 on host beta (last in 2), rank 1 on host alpha (last in 3) '
                              'did not arrive" >&2; exit 1;; esac')
        self.ok(self.run_program(*self.small(*STEPS, "run.dir=run", "--restarts", "9", "run.elastic=1..4", "run.hosts=hosts",
                                             "run.host_failures=1", command)))
        self.assertEqual(self.starts(), ["4 alpha:2,beta:2", "2 alpha:2"])


if __name__ == "__main__":
    unittest.main()
