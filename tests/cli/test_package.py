"""The Debian package: its fields, what it contains, and that the program in it runs. tools/test_deb.sh
installs and removes it in a bare chroot."""
import os
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.join(os.environ["QUADRILLE_SOURCE"], "tests", "support"))
import program  # noqa: E402

BUILD = os.path.dirname(os.path.dirname(program.PROGRAM))


@unittest.skipUnless(shutil.which("dpkg-deb") and shutil.which("dpkg-shlibdeps"), "no dpkg-deb or dpkg-shlibdeps")
@unittest.skipIf(program.SANITIZED, "packages have no sanitizer")
class Package(program.ProgramTest):
    def call(self, *command):
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False,
                                env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "DPKG_DEB_COMPRESSOR_TYPE": "gzip",
                                     "DPKG_DEB_COMPRESSOR_LEVEL": "1"})  # faster
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def test_package(self):
        package = self.call(os.path.join(program.SOURCE, "tools/make_deb.sh"), BUILD, ".").strip()
        version = self.ok(self.run_program("version")).stdout.split()[1]
        architecture = self.call("dpkg", "--print-architecture").strip()
        self.assertEqual(os.path.basename(package), f"quadrille_{version}_{architecture}.deb")
        fields = self.call("dpkg-deb", "-f", package)
        for part in ("Package: quadrille\n", f"Version: {version}\n", f"Architecture: {architecture}\n", "libc6 ", "libyaml-0-2", "libjansson4"):
            self.assertIn(part, fields)
        names = []
        for line in self.call("dpkg-deb", "-c", package).splitlines():
            mode, owner, _, day, _, name = line.split()[:6]
            self.assertEqual((owner, day), ("root/root", "2023-11-14"), line)
            self.assertTrue(mode[0] == "l" or "w" not in mode[4:], line)  # for the owner only
            self.assertTrue(name == "./" or name.startswith("./usr/"), line)
            names.append(name)
        for name in ("bin/quadrille", "share/man/man1/quadrille-train.1.gz", "share/doc/quadrille/copyright", "share/doc/quadrille/changelog.gz",
                     "share/doc/quadrille/examples/demo.sh", "share/bash-completion/completions/quadrille",
                     "share/zsh/vendor-completions/_quadrille", "include/quadrille/train.h", "share/quadrille/clusters/h100.yaml"):
            self.assertIn("./usr/" + name, names)
        self.call("dpkg-deb", "-R", package, "out")
        self.assertEqual(self.call("out/usr/bin/quadrille", "version"), f"quadrille {version}\n")
        self.call("sh", "-c", "cd out && md5sum --quiet -c DEBIAN/md5sums")


if __name__ == "__main__":
    unittest.main()
