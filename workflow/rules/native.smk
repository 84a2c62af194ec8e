# Budgets at which caches are really cut: balance against max-mass on a sample of rows (paper, Table 1).
NATIVE_MODELS = models_of("native")


rule native:
    input:
        shards=of_model("<results>/shards/{model}/{arm}/{index}.safetensors"),
    output:
        "<results>/native/{model}.parquet",
    log:
        "<logs>/native/{model}.log",
    benchmark:
        "<benchmarks>/native/{model}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(1500),
    params:
        settings={key: value for key, value in config["native"].items() if key != "models"},
        code=code("native.py"),
        locked=locked("native.py"),
    message:
        "native budgets of {wildcards.model}"
    script:
        "../scripts/native.py"


rule native_table:
    input:
        expand("<results>/native/{model}.parquet", model=NATIVE_MODELS),
    output:
        csv=shown("<results>/tables/native.csv", "native"),
        md="<results>/tables/native.md",
    log:
        "<logs>/native_table.log",
    benchmark:
        "<benchmarks>/native_table.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        labels={model: LABELS[model] for model in NATIVE_MODELS},
        code=code("native_table.py"),
        locked=locked("native_table.py"),
    message:
        "make the table of native budgets"
    script:
        "../scripts/native_table.py"


rule native_all:
    input:
        rules.native_table.output if NATIVE_MODELS else [],
    message:
        "native budgets are measured"
