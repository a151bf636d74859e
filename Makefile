# The front door. CMake presets do the work: see CMakePresets.json and cmake/.
#
#   make build       the program, the libraries and the tests        PRESET=release|debug|asan|tsan|clang
#   make demo        trains a small model on four local ranks
#   make test        every test tier, with a summary
#   make bench       measures collectives, kernels and the training step
#   make install     PREFIX=/usr/local, DESTDIR=
#   make test-asan   unit, ops, dist and equiv tiers with address and undefined-behaviour sanitizers
#   make test-tsan   the same with the thread sanitizer, ranks as threads
#   make format      clang-format on all sources; make check-style only looks
#   make clean

PRESET ?= release
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
BUILD = build/$(PRESET)
SOURCES = $(shell git ls-files '*.c' '*.h')

.PHONY: build bootstrap demo test test-asan test-tsan bench install clean format check-style

build: bootstrap
	@cmake --preset $(PRESET) $(CMAKE_ARGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; false; }
	@cmake --build $(BUILD) -j $(JOBS)

bootstrap:
	@tools/bootstrap.sh
	@mkdir -p build

demo: build
	@QUADRILLE=$(CURDIR)/$(BUILD)/bin/quadrille bash examples/demo.sh

test: build
	@python3 tools/check_includes.py
	@python3 tools/run_tests.py --build $(BUILD) --jobs $(JOBS) $(TEST_ARGS)

test-asan:
	@$(MAKE) --no-print-directory build PRESET=asan
	@python3 tools/run_tests.py --build build/asan --jobs $(JOBS) --tiers unit,ops,dist,equiv --minutes 8 $(TEST_ARGS)

test-tsan:
	@$(MAKE) --no-print-directory build PRESET=tsan
	@python3 tools/run_tests.py --build build/tsan --jobs $(JOBS) --tiers unit,dist,equiv --minutes 6 $(TEST_ARGS)

bench: build
	@$(BUILD)/bin/quadrille bench kernels
	@$(BUILD)/bin/quadrille bench collectives
	@$(BUILD)/bin/quadrille bench step

install:
	@$(MAKE) --no-print-directory build CMAKE_ARGS='$(CMAKE_ARGS) -DCMAKE_INSTALL_PREFIX=$(PREFIX)'
	@DESTDIR=$(DESTDIR) cmake --install $(BUILD)

clean:
	rm -rf build

format:
	clang-format -i $(SOURCES)

check-style:
	clang-format --dry-run --Werror $(SOURCES)
	python3 tools/check_includes.py
