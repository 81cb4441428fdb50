# All shipped weights and their cards from tables of measured runs (docs/tables.md):
#
#   make -f models/weights.mk DATA=../shared/data
#
# An interrupted run continues: traces and finished folds are kept in CACHE under a digest of the code, and a file is made again
# only if a table is newer. `make -f models/weights.mk -B step-time` makes one again. The names of the predictors are targets.

DATA ?= ../shared/data
CACHE ?= .perfguard-cache
JOBS ?= 2
# Rows of each table for the papers' predictors: whole networks, drawn with a fixed seed.
PAPER_ROWS ?= 600
PYTHON ?= .venv/bin/python

TRAIN := $(PYTHON) -m perfguard.cli train
COMMON = --cache $(CACHE) --jobs $(JOBS)
OURS := models/perfguard_models/weights
PAPERS := models/perfguard_research/weights
MADE := $(CACHE)/tables

RUNS := $(DATA)/runs.csv.gz $(DATA)/transformers_e2e.csv $(DATA)/workloads.csv.gz $(MADE)/published.csv
OPERATORS := $(DATA)/operators.csv.gz $(DATA)/ops.csv.gz $(MADE)/aic.csv
COMPILED := $(DATA)/new/timm_dynamo.csv.gz
PERCEPTRONS := $(DATA)/mlp_a100.csv.gz
H100 := benchmarks/data/h100_rows.csv
CPU := benchmarks/data/cpu.csv.gz

PUBLISHED := $(addprefix $(DATA)/published/,$(addsuffix .csv.gz,cs336_more hfdocs lamikr pycls vae)) $(DATA)/new/lambda_logs.csv.gz
OF_PAPERS := dnnperf dnnabacus perfseer dippm lilou

.PHONY: all results step-time memory-forest cpu-memory-forest trees fusion kernels $(OF_PAPERS)
all: results

# The tables in the cards and in docs/results that are read from the weights.
results: step-time memory-forest cpu-memory-forest trees fusion kernels $(OF_PAPERS)
	$(PYTHON) tools/results.py

step-time: $(OURS)/step-time.safetensors
memory-forest cpu-memory-forest: %: $(OURS)/%.safetensors
trees fusion kernels $(OF_PAPERS): %: $(PAPERS)/%.safetensors

$(MADE)/published.csv: $(PUBLISHED)
	mkdir -p $(@D)
	$(PYTHON) -m perfguard_research.published $^ --out $@

$(MADE)/aic.csv: $(DATA)/new/aic_operators.csv.gz
	mkdir -p $(@D)
	$(PYTHON) -m perfguard_research.published $^ --out $@

$(OURS)/step-time.safetensors: $(RUNS) $(OPERATORS) $(COMPILED) $(CPU)
	$(TRAIN) $^ --predictor step-time --set epochs=10 --most-operators 8000 --splits family,source,gpu --out $(@D) $(COMMON)

$(OURS)/memory-forest.safetensors: $(DATA)/workloads.csv.gz $(PERCEPTRONS)
	$(TRAIN) $^ --predictor memory-forest --splits family,gpu --out $(@D) $(COMMON)

$(OURS)/cpu-memory-forest.safetensors: $(CPU)
	$(TRAIN) $^ --predictor memory-forest --splits family --out $(@D) $(COMMON)

$(PAPERS)/trees.safetensors: $(RUNS) $(PERCEPTRONS)
	$(TRAIN) $^ --predictor trees --splits family,gpu --out $(@D) $(COMMON)

$(addprefix $(PAPERS)/,$(addsuffix .safetensors,$(OF_PAPERS))): $(RUNS) $(PERCEPTRONS) $(H100)
	$(TRAIN) $^ --predictor $(basename $(@F)) --most-runs $(PAPER_ROWS) --splits family --out $(@D) $(COMMON)

# What compilers of this machine fuse, in some minutes.
$(MADE)/labels.jsonl:
	mkdir -p $(@D)
	$(PYTHON) -m perfguard_research.fusion.labels --out $@ --minutes 12

$(PAPERS)/fusion.safetensors: $(MADE)/labels.jsonl
	$(PYTHON) -m perfguard_research.fusion.train $^ --out $(@D)

$(PAPERS)/kernels.safetensors: $(DATA)/operators.csv.gz
	$(PYTHON) -m perfguard_research.fusion.kernels $^ --out $(@D)
