"""Starts `quadrille serve` in tests and talks to it, politely and otherwise."""
import http.client
import json
import select
import socket
import subprocess
import time

import program


class Server:
    """with Server(folder, "runs") as server: server.get("/api/runs")"""

    def __init__(self, folder, *arguments):
        self.command = [program.PROGRAM, "serve", *arguments]
        self.folder = folder

    def __enter__(self):
        self.process = subprocess.Popen(  # pylint: disable=consider-using-with
            self.command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        self.url = self.process.stdout.readline().strip() if ready else ""
        if not self.url:
            self.process.kill()
            raise RuntimeError("the server did not start: " + self.process.communicate()[1])
        address, self.token = self.url.split("/#")
        self.host = address.removeprefix("http://")
        self.port = int(self.host.rsplit(":", 1)[1])
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.output, self.errors = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def ask(self, path, method="GET", headers=None, body=None, token=True, timeout=30):
        """Status, headers and text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            everything = {"Host": self.host, **({"Authorization": f"Bearer {self.token}"} if token else {}), **(headers or {})}
            connection.request(method, path, body=body, headers=everything)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def get(self, path, **more):
        status, _, text = self.ask(path, **more)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {text}")
        return json.loads(text)

    def raw(self, data, seconds=5.0):
        """Sends bytes and returns what comes back until the server closes or the time is up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as plug:
            answer, end = b"", time.monotonic() + seconds
            try:
                plug.sendall(data)
                plug.shutdown(socket.SHUT_WR)
                while time.monotonic() < end and (piece := plug.recv(65536)):
                    answer += piece
            except OSError:
                pass
            return answer
