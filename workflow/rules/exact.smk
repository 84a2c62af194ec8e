# Short contexts, every row of which is decided over all of its keys: kappa itself beside kappa-hat (paper, section 2).
EXACT_MODELS = models_of("exact")

EXACT_INDICES = [f"{index:03d}" for index in range(config["exact"]["contexts"])]


use rule make_contexts as make_exact_contexts with:
    output:
        "<results>/exact/contexts/{model}/{arm}.json",
    log:
        "<logs>/make_exact_contexts/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/make_exact_contexts/{model}/{arm}.tsv"
    params:
        text=lambda wildcards: config["text_sources"][wildcards.arm],
        hashes=lambda wildcards: hashes([config["text_sources"][wildcards.arm]["wheel"]]),
        windows=lambda wildcards: {
            "length": config["exact"]["length"],
            "count": config["exact"]["contexts"],
            "seed": config["contexts"]["seeds"][wildcards.arm],
        },
        code=code("make_contexts.py"),
        locked=locked("make_contexts.py"),
    message:
        "make short contexts of {wildcards.arm} for {wildcards.model}"


use rule capture as capture_exact with:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        contexts="<results>/exact/contexts/{model}/{arm}.json",
    output:
        expand("<results>/exact/shards/{{model}}/{{arm}}/{index}.safetensors", index=EXACT_INDICES),
    log:
        "<logs>/capture_exact/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/capture_exact/{model}/{arm}.tsv"
    params:
        positions=config["exact"]["positions"],
        device=config["device"],
        code=code("capture.py"),
        locked=locked("capture.py"),
    message:
        "capture rows of {wildcards.model} on short contexts of {wildcards.arm}"


rule exact:
    input:
        shards=expand(
            "<results>/exact/shards/{model}/{arm}/{index}.safetensors",
            arm=ARMS,
            index=EXACT_INDICES,
            allow_missing=True,
        ),
    output:
        "<results>/exact/{model}.parquet",
    log:
        "<logs>/exact/{model}.log",
    benchmark:
        "<benchmarks>/exact/{model}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(1500),
        gpu=int(config["device"] != "cpu"),
    params:
        device=config["device"],
        settings={key: config["exact"][key] for key in ("s", "floor", "tolerance", "most_work", "rows", "seed")},
        enumeration={key: config["enumeration"][key] for key in ("families", "swap_keys")},
        code=code("exact.py"),
        locked=locked("exact.py"),
    message:
        "decide every row of {wildcards.model}"
    script:
        "../scripts/exact.py"


rule exact_table:
    input:
        expand("<results>/exact/{model}.parquet", model=EXACT_MODELS),
    output:
        csv=shown("<results>/tables/exact.csv", "exact"),
        md="<results>/tables/exact.md",
    log:
        "<logs>/exact_table.log",
    benchmark:
        "<benchmarks>/exact_table.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        apart=APART,
        labels={model: LABELS[model] for model in EXACT_MODELS},
        code=code("exact_table.py"),
        locked=locked("exact_table.py"),
    message:
        "make the table of exact kappa"
    script:
        "../scripts/exact_table.py"


rule exact_all:
    input:
        rules.exact_table.output if EXACT_MODELS else [],
    message:
        "every row of the short contexts is decided"
