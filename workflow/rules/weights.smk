# Free weights and the geometric selection on a sample of rows (paper, section 2, Table 8).
WEIGHED = models_of("weights")


rule weights:
    input:
        shards=of_model("<results>/shards/{model}/{arm}/{index}.safetensors"),
    output:
        "<results>/weights/{model}.parquet",
    log:
        "<logs>/weights/{model}.log",
    benchmark:
        "<benchmarks>/weights/{model}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(1500),
    params:
        settings={key: value for key, value in config["weights"].items() if key != "models"},
        code=code("weights.py"),
        locked=locked("weights.py"),
    message:
        "free weights of {wildcards.model}"
    script:
        "../scripts/weights.py"


rule weights_table:
    input:
        expand("<results>/weights/{model}.parquet", model=WEIGHED),
    output:
        csv=shown("<results>/tables/weights.csv", "weights"),
        md="<results>/tables/weights.md",
    log:
        "<logs>/weights_table.log",
    benchmark:
        "<benchmarks>/weights_table.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        apart=APART,
        labels={model: LABELS[model] for model in WEIGHED},
        code=code("weights_table.py"),
        locked=locked("weights_table.py"),
    message:
        "make the table of free weights"
    script:
        "../scripts/weights_table.py"


rule weights_all:
    input:
        rules.weights_table.output if WEIGHED else [],
    message:
        "free weights are measured"
