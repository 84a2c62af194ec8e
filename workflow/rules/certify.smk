# A sample of each model's rows against all of their keys: is the best known set the best there is?


rule certify:
    input:
        shards=of_model("<results>/shards/{model}/{arm}/{index}.safetensors"),
        instances=of_model("<results>/instances/{model}/{arm}/{index}.parquet"),
    output:
        "<results>/certificates/{model}/s{budget}.parquet",
    log:
        "<logs>/certify/{model}/s{budget}.log",
    benchmark:
        "<benchmarks>/certify/{model}/s{budget}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        certificate=config["certificate"],
        enumeration=config["enumeration"],
        code=code("certify.py"),
        locked=locked("certify.py"),
    message:
        "certify {wildcards.model} at s = {wildcards.budget}"
    script:
        "../scripts/certify.py"


rule certify_all:
    input:
        expand(
            "<results>/certificates/{model}/s{budget}.parquet",
            model=MODELS,
            budget=BUDGETS,
        ),
    message:
        "every certificate is there"
