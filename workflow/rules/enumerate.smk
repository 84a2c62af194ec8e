# Every row of a shard at every budget: max-mass, balance, and the exact best set of the candidate families.


rule enumerate:
    input:
        "<results>/shards/{model}/{arm}/{index}.safetensors",
    output:
        "<results>/instances/{model}/{arm}/{index}.parquet",
    log:
        "<logs>/enumerate/{model}/{arm}/{index}.log",
    benchmark:
        "<benchmarks>/enumerate/{model}/{arm}/{index}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(1500),
        gpu=int(config["device"] != "cpu"),
    params:
        enumeration=config["enumeration"],
        device=config["device"],
        code=code("enumerate.py"),
        locked=locked("enumerate.py"),
    message:
        "enumerate {wildcards.model} on {wildcards.arm}/{wildcards.index}"
    script:
        "../scripts/enumerate.py"


rule enumerate_all:
    input:
        expand(
            "<results>/instances/{model}/{arm}/{index}.parquet",
            model=MODELS,
            arm=ARMS,
            index=INDICES,
        ),
    message:
        "every shard is enumerated"
