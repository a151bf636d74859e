# The front door. CMake presets do the work: see CMakePresets.json and cmake/.
#
#   make build       the program, the libraries and the tests        PRESET=release|debug|asan|tsan|clang
#   make demo        trains a small model on four local ranks; builds the program only, without tests
#   make test        every test tier, with a summary
#   make bench       measures collectives, kernels and the training step
#   make install     PREFIX=/usr/local, DESTDIR=
#   make deb         a Debian package in build/; make test-deb tries it in a bare chroot (as root)
#   make test-image  builds the Dockerfile with buildah and trains in the image (as root)
#   make test-asan   unit, ops, dist and equiv tiers and the web server with address and undefined-behaviour sanitizers
#   make test-tsan   unit, dist and equiv tiers and the web server with the thread sanitizer
#   make fuzz        libFuzzer on every reader of files, RUNS=1000000 inputs each (clang)
#   make check-style layout of the sources, include directions, language
#   make clean
#
# What runs in which build. Release: every case of every tier. Sanitizers: the tiers above, every test of them, with fewer steps
# and a fixed part of each table of cases (tests/support/sample.h); not what looks at numbers or text only
# (kernels against numerical gradients, golden and cli tiers), nor what a test says in a line "ctest: not under ...". Ranks are
# threads under the thread sanitizer, and threads, processes and MPI under the other.

PRESET ?= release
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
BUILD = build/$(PRESET)

.PHONY: build bootstrap demo test test-asan test-tsan fuzz bench install deb test-deb test-image clean check-style

build: bootstrap
	@cmake --preset $(PRESET) -DQD_DEMO=OFF $(CMAKE_ARGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; false; }
	@cmake --build $(BUILD) -j $(JOBS)

# The web server is optional: without its library, `quadrille serve` says so.
bootstrap:
	@tools/bootstrap.sh
	@tools/bootstrap.sh --if-possible libmicrohttpd-dev libucx-dev libsodium-dev
	@mkdir -p build

# Uses the program of an earlier make build. Otherwise it builds the program alone, in the same
# folder, without CUDA and test libraries; MPI is used if it is there.
demo:
	@[ -f $(BUILD)/build.ninja ] || { tools/bootstrap.sh --program && mkdir -p build; }
	@[ -f $(BUILD)/build.ninja ] || cmake --preset $(PRESET) -DQD_DEMO=ON $(CMAKE_ARGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; false; }
	@cmake --build $(BUILD) -j $(JOBS) --target quadrille-program
	@QUADRILLE="$(CURDIR)/$(BUILD)/bin/quadrille" bash examples/demo.sh

# The page of a report is looked at in a real browser; machines of namespaces are joined by ip; words
# are completed in zsh; groff reads the manual pages.
test: build
	@tools/bootstrap.sh --if-possible chromium iproute2 zsh groff
	@python3 tools/run_tests.py --build $(BUILD) --jobs $(JOBS) $(TEST_ARGS)

test-asan:
	@$(MAKE) --no-print-directory build PRESET=asan
	@python3 tools/run_tests.py --build build/asan --jobs $(JOBS) --tiers unit,ops,dist,equiv --also '^cli/serve$$' --minutes 8 $(TEST_ARGS)

test-tsan:
	@$(MAKE) --no-print-directory build PRESET=tsan
	@python3 tools/run_tests.py --build build/tsan --jobs $(JOBS) --tiers unit,dist,equiv --also '^cli/serve$$' --minutes 8 $(TEST_ARGS)

# Only the fuzz targets and the library are built. RUNS=0 only tries the seeds and what earlier runs found.
RUNS ?= 1000000
fuzz:
	@tools/bootstrap.sh clang libclang-rt-14-dev
	@mkdir -p build && cmake --preset fuzz $(CMAKE_ARGS) >build/fuzz.log 2>&1 || { cat build/fuzz.log; false; }
	@cmake --build build/fuzz -j $(JOBS) --target fuzz-targets
	@python3 tools/fuzz.py --build build/fuzz --runs $(RUNS) --jobs $(JOBS)

bench: build
	@$(BUILD)/bin/quadrille bench kernels
	@$(BUILD)/bin/quadrille bench collectives
	@$(BUILD)/bin/quadrille bench step

install:
	@$(MAKE) --no-print-directory build CMAKE_ARGS='$(CMAKE_ARGS) -DCMAKE_INSTALL_PREFIX="$(PREFIX)"'
	@DESTDIR="$(DESTDIR)" cmake --install $(BUILD)

# In a build of its own, because paths depend on the prefix.
deb:
	@tools/bootstrap.sh dpkg-dev libmicrohttpd-dev
	@mkdir -p build && cmake --preset release -B build/deb -DQD_TESTS=OFF -DCMAKE_INSTALL_PREFIX=/usr $(CMAKE_ARGS) >build/deb.log 2>&1 || { cat build/deb.log; false; }
	@cmake --build build/deb -j $(JOBS)
	@tools/make_deb.sh build/deb build

test-deb: deb
	@tools/bootstrap.sh mmdebstrap
	@tools/test_deb.sh build/quadrille_*_*.deb

test-image:
	@tools/bootstrap.sh buildah mmdebstrap
	@tools/test_image.sh

clean:
	rm -rf build

check-style:
	@python3 tools/check_layout.py
	@python3 tools/check_includes.py
	@python3 tools/check_language.py
