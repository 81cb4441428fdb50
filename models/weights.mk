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

# $(call tables,NAME...): the measured tables of these names.
tables = $(addprefix $(DATA)/,$(addsuffix .csv.gz,$(1)))

WORKLOADS := $(call tables,workloads)
RUNS := $(call tables,runs) $(DATA)/transformers_e2e.csv $(WORKLOADS) $(MADE)/published.csv
OPERATORS := $(call tables,operators ops) $(MADE)/aic.csv
COMPILED := $(call tables,new/timm_dynamo)
PERCEPTRONS := $(call tables,mlp_a100)
H100 := benchmarks/data/h100_rows.csv
CPU := benchmarks/data/cpu.csv.gz

PUBLISHED := $(call tables,$(addprefix published/,cs336_more hfdocs lamikr pycls vae) new/lambda_logs)
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

$(MADE)/aic.csv: $(call tables,new/aic_operators)
	mkdir -p $(@D)
	$(PYTHON) -m perfguard_research.published $^ --out $@

$(OURS)/step-time.safetensors: $(RUNS) $(OPERATORS) $(COMPILED) $(CPU)
	$(TRAIN) $^ --predictor step-time --set epochs=10 --most-operators 8000 --splits family,source,gpu --out $(@D) $(COMMON)

$(OURS)/memory-forest.safetensors: $(WORKLOADS) $(PERCEPTRONS)
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

$(PAPERS)/kernels.safetensors: $(call tables,operators)
	$(PYTHON) -m perfguard_research.fusion.kernels $^ --out $(@D)
