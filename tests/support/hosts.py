"""Several simulated machines on one: each has its own network, name, processes, shared memory and
clock, made of Linux namespaces.

The test itself first moves into namespaces (enter()), in which the machines are created. When it
ends, in whatever way, the kernel removes them all with everything that runs in them.
"""
import os
import shutil
import subprocess
import sys

SKIPPED = 77
_INSIDE = "QUADRILLE_TEST_HOSTS"
_PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "mount": "mount", "hostname": "hostname",
             "mpirun": "openmpi-bin"}


def _outer():
    """A command that runs another as root of its own namespaces; needs no root privileges where users may create namespaces."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]


def _skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def enter():
    """Continues in new namespaces, replacing this process; skips the test if there are none."""
    if os.environ.get(_INSIDE):
        return
    missing = [f"{tool} (of package {package})" for tool, package in _PACKAGES.items() if not shutil.which(tool)]
    if missing:
        _skip(f"needs {', '.join(missing)}")
    if "Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout:
        _skip("needs Open MPI's mpirun, which can be configured how to reach a host")
    probe = "ip link add lan type bridge && ip link add one type veth peer name two && unshare --uts --time --fork hostname other"
    result = subprocess.run([*_outer(), "sh", "-c", probe], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        _skip(f"needs namespaces for networks, names and clocks (root, or a system that lets users make them): {result.stderr.strip()}")
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", [*_outer(), sys.executable, *sys.argv])


class Host:
    """One machine. The first shares the PID namespace of the test, so that it can enter the others; each of these has its own."""

    def __init__(self, name, number, clock):
        self.name, self.link, self.address = name, f"lan{number}", f"10.77.0.{number + 1}"
        self.kinds = ["--net", "--mount", "--uts", "--ipc", *(["--pid"] if number else [])]
        # The first process reaps children, including orphans.
        first = "mount -t tmpfs tmpfs /dev/shm && hostname $0 && echo made && while :; do sleep 1000 & wait; done"
        if number:
            first = f"mount -t proc proc /proc && {first}"
        command = ["unshare", *self.kinds, "--time", f"--monotonic={clock}", "--fork", "--kill-child", "sh", "-c", first, name]
        self.holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if self.holder.stdout.readline() != "made\n":
            raise OSError(f"host {name} could not be created")
        with open(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children", encoding="ascii") as file:
            self.first = int(file.read())
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.first))
        _ip("link", "set", self.link, "master", "lan", "up")
        for words in ("link set lo up", f"address add {self.address}/24 dev eth0", "link set eth0 up"):
            subprocess.run(self.enter("ip", *words.split()), check=True)

    def enter(self, *command):
        """The command line that runs a command on this machine."""
        return ["nsenter", "--target", str(self.first), *self.kinds, "--time", *command]

    def processes(self):
        """Process ids, in the test's namespace, of all its processes but those that keep it alive."""
        network, found = os.readlink(f"/proc/{self.first}/ns/net"), []
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/net") == network:
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        found += [int(name)] if int(name) not in (self.first, self.holder.pid) and file.read() != b"sleep\x001000\0" else []
            except OSError:
                pass
        return found

    def unplug(self):
        """Takes the network down; no process is notified."""
        _ip("link", "set", self.link, "down")

    def plug(self):
        _ip("link", "set", self.link, "up")

    def remove(self):
        for pid in self.processes():
            os.kill(pid, 9)
        self.holder.kill()
        self.holder.wait()
        self.holder.stdout.close()


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


class Hosts:
    """Machines in one network; the first starts MPI jobs. folder: visible to all, as on a network file system."""

    def __init__(self, names, folder):
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "lan", "type", "bridge")
        _ip("link", "set", "lan", "up")
        self.folder, listing = folder, os.path.join(folder, "hosts")
        self.agent = os.path.join(folder, "enter-host")
        self.hosts = []
        try:
            with open(listing, "w", encoding="ascii") as file:
                file.write("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(names)))
            subprocess.run(["mount", "--bind", listing, "/etc/hosts"], check=True)
            for i, name in enumerate(names):
                self.hosts.append(Host(name, i, clock=i * 5000))
            self._write_agent()
        except BaseException:
            self.remove()
            raise

    def _write_agent(self):
        """mpirun's replacement for ssh: `enter-host NAME WORDS...`, with the environment of a login and nothing else."""
        cases = "".join(f"{h.name}) enter='{' '.join(h.enter())}';;\n" for h in self.hosts)
        root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        login = f"env -i HOME={os.environ.get('HOME', '/')} PATH={os.environ['PATH']} {root}"
        with open(self.agent, "w", encoding="ascii") as file:
            file.write(f'#!/bin/sh\ncase $1 in\n{cases}*) echo "no host $1" >&2; exit 255;;\nesac\nshift\n'
                       f'exec {login} $enter sh -c "$*"\n')
        os.chmod(self.agent, 0o755)

    def mpirun(self, slots, **parameters):
        """The start of a command line that runs slots[i] ranks on host i, with MCA parameters. If one exits with a status other
        than 0, mpirun kills the others immediately, not after a second."""
        where = ",".join(f"{h.name}:{n}" for h, n in zip(self.hosts, slots) if n)
        chosen = {"plm_rsh_agent": self.agent, "orte_tmpdir_base": self.folder, "odls_base_sigkill_timeout": 0, **parameters}
        settings = [word for name, value in chosen.items() for word in ("--mca", name, str(value))]
        return self.hosts[0].enter("mpirun", "--host", where, *settings)

    def remove(self):
        for host in self.hosts:
            if host.holder.poll() is None:
                host.remove()
        for name in [h.link for h in self.hosts] + ["lan"]:
            subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
        subprocess.run(["umount", "/etc/hosts"], check=False, capture_output=True)
