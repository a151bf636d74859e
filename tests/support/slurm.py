"""Slurm on the machines of hosts.py, from Debian's slurm-wlm: one controller, a slurmd per machine.

The programs may be installed, or unpacked in a folder that PATH and LD_LIBRARY_PATH name.
"""
import os
import shutil
import subprocess

import program

_TOOLS = {name: shutil.which(name) or shutil.which(f"{name}-wlm") for name in ("slurmctld", "slurmd", "slurmstepd", "srun", "sinfo")}


def missing():
    """Names of programs that are not there."""
    return [name for name, path in _TOOLS.items() if not path]


class Slurm:
    """Two ranks per machine, whatever its cores are. A machine that does not answer is down after some seconds, and back once it does.

    The machines share the folder /tmp, where slurmd's PMIx plugin would make one folder per step: the second to make it fails. So each
    has a folder of its own (TmpFS).
    """

    def __init__(self, network, slots=2):
        self.network, folder = network, network.folder
        root = os.path.dirname(os.path.dirname(os.path.realpath(_TOOLS["slurmctld"])))
        plugins = os.path.join(root, "lib", "x86_64-linux-gnu", "slurm-wlm")
        self.configuration = os.path.join(folder, "slurm.conf")
        os.mkdir(os.path.join(folder, "slurm-state"))
        for host in network.hosts:
            os.mkdir(os.path.join(folder, f"slurm-tmp-{host.name}"))
        nodes = "".join(f"NodeName={h.name} NodeAddr={h.address} CPUs={slots} RealMemory=1000 State=UNKNOWN\n" for h in network.hosts)
        with open(self.configuration, "w", encoding="ascii") as file:
            file.write(f"""ClusterName=test
SlurmctldHost={network.hosts[0].name}({network.hosts[0].address})
PluginDir={plugins}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/slurm-state
SlurmdSpoolDir={folder}/slurm-%n
TmpFS={folder}/slurm-tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=6
KillWait=2
InactiveLimit=0
WaitTime=5
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
        self.environment = {**os.environ, "SLURM_CONF": self.configuration}
        self.processes = []
        try:
            self._start(network.hosts[0], _TOOLS["slurmctld"], "-D")
            for host in network.hosts:
                self._start(host, _TOOLS["slurmd"], "-D", "-N", host.name, "-d", _TOOLS["slurmstepd"])
            if not program.wait_until(lambda: self.states().count("idle") == len(network.hosts), 30):
                raise OSError(f"Slurm does not start: {self.states()} {self.log()}")
        except BaseException:
            self.remove()
            raise

    def _start(self, host, *command):
        self.processes.append(subprocess.Popen(host.enter(*command), env=self.environment, stdin=subprocess.DEVNULL,
                                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def states(self):
        return subprocess.run(self.network.hosts[0].enter(_TOOLS["sinfo"], "-h", "-N", "-o", "%t"), env=self.environment,
                              capture_output=True, text=True, check=False).stdout.split()

    def log(self):
        text = ""
        for name in ["slurmctld.log", *(f"slurmd-{h.name}.log" for h in self.network.hosts)]:
            try:
                with open(os.path.join(self.network.folder, name), encoding="utf-8") as file:
                    text += f"\n{name}:\n{file.read()[-2000:]}"
            except OSError:
                pass
        return text

    @staticmethod
    def srun():
        return _TOOLS["srun"]

    @staticmethod
    def answers():
        """A command that succeeds if Slurm can use {host}."""
        return f"{_TOOLS['sinfo']} -h -n {{host}} -o %t | grep -qxE 'idle|alloc|mix|comp'"

    def remove(self):
        for process in reversed(self.processes):
            process.kill()
            process.wait()
