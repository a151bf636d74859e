"""Starts the ranks of a run in each way that there is: by our launcher, under mpirun, and as
processes that meet by themselves over UCX, as torchrun and Kubernetes start them
(docs/clusters.md)."""
import functools
import os
import secrets
import signal
import socket
import subprocess

import program

# The variables that may name the rank of a process.
RANK = {"local": ["QUADRILLE_RANK"], "mpi": ["OMPI_COMM_WORLD_RANK", "PMI_RANK"], "ucx": ["RANK"]}
NO_UCX = "this build has no UCX"


def free_port():
    """Not one that the system gives to connections of other tests (from 32768 on), before it is used."""
    while True:
        port = secrets.choice(range(10000, 20000))
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def environment(variables, rank):
    """Of one process of a world without MPI: `variables`, in which {rank} stands for its rank."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCH"))}
    if program.SANITIZED:
        clean["ASAN_OPTIONS"] = "detect_leaks=0"  # UCX
    return {**clean, **{key: value.replace("{rank}", str(rank)) for key, value in variables.items()}}


def named(ranks=2, **more):
    """The variables of a world without MPI on this machine."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "{rank}", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "{rank}",
            **more}


@functools.cache
def has_ucx():
    result = subprocess.run([program.PROGRAM, "train", "run.join_deadline=0.1"], env=environment(named(), 0), capture_output=True, text=True,
                            timeout=30, check=False)
    return NO_UCX not in result.stderr


@functools.cache
def apart():
    """The start of a command whose process shares no memory with others, so that UCX reaches it over
    TCP; empty where users may not create namespaces."""
    for command in (["unshare", "--ipc"], ["unshare", "--user", "--map-root-user", "--ipc"]):
        try:
            if subprocess.run([*command, "true"], capture_output=True, timeout=30, check=False).returncode == 0:
                return command
        except OSError:
            pass
    return []


def backends():
    return ["local", *(["mpi"] if program.MPIRUN else []), *(["ucx"] if has_ucx() else [])]


class World:
    """A started run. `arguments` are those of the program without the number of ranks; its processes
    are found by `mark`, a part of them. `errors` names a file for what all of them report. mixed:
    with UCX, odd ranks are reached over TCP; a rank that nobody shares a machine with is not known
    to be stopped."""

    def __init__(self, backend, ranks, arguments, mark, errors, mixed=False):
        self.backend, self.ranks, self.mark, self.path = backend, ranks, mark, errors
        command = [program.PROGRAM, *arguments]
        if backend == "local":
            command.append(f"parallel.ranks={ranks}")
        elif backend == "mpi":
            command = [program.MPIRUN, "--oversubscribe", "-n", str(ranks), *command]
        variables = named(ranks) if backend == "ucx" else {}
        with open(errors, "ab") as file:
            file.truncate(0)
            self.started = [subprocess.Popen([*(apart() if mixed and backend == "ucx" and rank % 2 else []), *command],
                                             stdout=subprocess.DEVNULL, stderr=file, cwd=os.path.dirname(errors),
                                             env=environment(variables, rank) if backend == "ucx" else None)
                            for rank in range(ranks if backend == "ucx" else 1)]

    def errors(self):
        with open(self.path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def pids(self):
        """Rank → process, of those that have started and not ended."""
        found = [(pid, program.variable_of(pid, name)) for pid in program.processes(self.mark) for name in RANK[self.backend]]
        return {int(rank): pid for pid, rank in found if rank}

    def launcher(self):
        """The process that has started the ranks; None without MPI, where another program does."""
        return None if self.backend == "ucx" else self.started[0].pid

    def runs(self):
        """Whether anything that was started here has not ended."""
        return any([run.poll() is None for run in self.started])

    def where(self):
        """What its processes are doing, and what they have reported."""
        return "\n".join([program.where_is(pid) for pid in program.processes(self.mark)] + [self.errors()])

    def wait(self, seconds):
        """Exit statuses: of the launcher, or of each rank. A world that does not end in time is
        killed; the error says where it was."""
        if not program.wait_until(lambda: not self.runs(), seconds):
            where = self.where()
            self.kill()
            raise AssertionError(f"{self.backend} has not ended after {seconds:g} s:\n{where}")
        return [run.returncode for run in self.started]

    def kill(self):
        for run in self.started:
            run.kill()
        for pid in program.processes(self.mark):
            os.kill(pid, signal.SIGKILL)
        for run in self.started:
            run.wait()
