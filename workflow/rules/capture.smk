# Attention rows and values out of one forward pass per context. One job takes all contexts of a model and arm, as
# importing torch and loading the model costs more than a pass.


rule capture:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        contexts="<results>/contexts/{model}/{arm}.json",
    output:
        expand("<results>/shards/{{model}}/{{arm}}/{index}.safetensors", index=INDICES),
    log:
        "<logs>/capture/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/capture/{model}/{arm}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(4000),
        gpu=int(config["device"] != "cpu"),
    params:
        positions=config["capture"]["positions"],
        device=config["device"],
        code=code("capture.py"),
        locked=locked("capture.py"),
    message:
        "capture rows of {wildcards.model} on {wildcards.arm}"
    script:
        "../scripts/capture.py"


rule capture_all:
    input:
        expand(
            "<results>/shards/{model}/{arm}/{index}.safetensors",
            model=MODELS,
            arm=ARMS,
            index=INDICES,
        ),
    message:
        "every shard is captured"
