"""Collectives between two machines made of namespaces on this computer: backend ucx compared with
backend mpi and with Open MPI's own calls, both over TCP.

    bench/remote/measure.py [BUILD FOLDER] [RANKS PER MACHINE] [SECONDS PER ROW] [OPERATION, or all] [TCP]

TCP is the congestion control of both machines (cubic, bbr), by default that of this computer. The
kernel lets namespaces choose one of net.ipv4.tcp_allowed_congestion_control.

Needs Open MPI, and root or a system where users may create namespaces. The ranks are not bound to
cores: namespaced machines share them.
"""
import os
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
import hosts  # noqa: E402
import subprocess  # noqa: E402

CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


def main():
    build = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/release"))
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    seconds = sys.argv[3] if len(sys.argv) > 3 else "0.5"
    operation = [word for word in sys.argv[4:5] if word != "all"]
    hosts.enter()
    os.environ.update(QUADRILLE_SECRET="only for this measurement", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    with tempfile.TemporaryDirectory() as folder:
        network = hosts.Hosts(["alpha", "beta"], folder)
        try:
            for host in network.hosts if len(sys.argv) > 5 else []:
                subprocess.run(host.enter("sh", "-c", f"echo {sys.argv[5]} >{CONTROL}"), check=True)
            print("TCP:", subprocess.run(network.hosts[0].enter("cat", CONTROL), capture_output=True, text=True, check=True).stdout, flush=True)
            start = network.mpirun((ranks, ranks), btl="tcp,self", btl_tcp_if_include="eth0", pml="ob1")
            passed = [word for name in os.environ if name.startswith(("UCX_", "QUADRILLE_SECRET")) for word in ("-x", name)]
            command = [*start, "--bind-to", "none", *passed, f"{build}/bench/bench-remote", "10.77.0.1", "29500", seconds, *operation]
            sys.exit(subprocess.run(command, check=False).returncode)
        finally:
            network.remove()


if __name__ == "__main__":
    main()
