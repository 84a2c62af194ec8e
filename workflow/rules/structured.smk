# Task-structured contexts: question and answer in the same pass, against bounds registered before their capture.
from contourkv.benchmark.tasks import wheels_of
from contourkv.structured import check_structured, structured_settings

try:
    check_structured(config)
except ContourKVError as error:
    sys.exit(f"error: {error}")


STRUCTURED = {
    entry["name"]: structured_settings(entry, config["structured"]["contexts"])
    for entry in config["structured"]["arms"]
}
STRUCTURED_INDICES = [f"{index:03d}" for index in range(config["structured"]["contexts"])]
BOUNDS = "config/registered_bounds.yaml"


rule make_structured:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        wheels=lambda wildcards: [
            wheel(requirement) for requirement in wheels_of(STRUCTURED[wildcards.arm], config["text_sources"])
        ],
    output:
        "<results>/structured/contexts/{model}/{arm}.json",
    log:
        "<logs>/make_structured/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/make_structured/{model}/{arm}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(2000),
    params:
        settings=lambda wildcards: STRUCTURED[wildcards.arm],
        rows={key: config["structured"][key] for key in ("retrieval", "background")},
        text_sources=lambda wildcards: {
            arm: source
            for arm, source in config["text_sources"].items()
            if arm == STRUCTURED[wildcards.arm].get("arm")
        },
        wheels="resources/wheels",
        hashes=lambda wildcards: hashes(wheels_of(STRUCTURED[wildcards.arm], config["text_sources"])),
        code=code("make_structured.py"),
        locked=locked("make_structured.py"),
    message:
        "make structured contexts {wildcards.arm} for {wildcards.model}"
    script:
        "../scripts/make_structured.py"


# As `capture` and `enumerate`, of the contexts' own query positions; the bounds are no input, as rows must not be
# captured anew because a bound changed.
use rule capture as capture_structured with:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        contexts="<results>/structured/contexts/{model}/{arm}.json",
    output:
        expand("<results>/structured/shards/{{model}}/{{arm}}/{index}.safetensors", index=STRUCTURED_INDICES),
    log:
        "<logs>/capture_structured/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/capture_structured/{model}/{arm}.tsv"
    params:
        positions=None,
        bounds=BOUNDS,
        device=config["device"],
        code=code("capture.py"),
        locked=locked("capture.py"),
    message:
        "capture rows of {wildcards.model} on structured {wildcards.arm}"


use rule enumerate as enumerate_structured with:
    input:
        "<results>/structured/shards/{model}/{arm}/{index}.safetensors",
    output:
        "<results>/structured/instances/{model}/{arm}/{index}.parquet",
    log:
        "<logs>/enumerate_structured/{model}/{arm}/{index}.log",
    benchmark:
        "<benchmarks>/enumerate_structured/{model}/{arm}/{index}.tsv"
    message:
        "enumerate {wildcards.model} on structured {wildcards.arm}/{wildcards.index}"


use rule merge_instances as merge_structured with:
    input:
        instances=expand(
            "<results>/structured/instances/{model}/{arm}/{index}.parquet",
            model=MODELS,
            arm=STRUCTURED,
            index=STRUCTURED_INDICES,
        ),
        certificates=[],
    output:
        "<results>/structured/instances.parquet",
    log:
        "<logs>/merge_structured.log",
    benchmark:
        "<benchmarks>/merge_structured.tsv"
    message:
        "join the instances of structured contexts"


rule structured_tables:
    input:
        structured="<results>/structured/instances.parquet",
        generic="<results>/instances.parquet",
        bounds=BOUNDS,
    output:
        csv=[shown(f"<results>/tables/{table}.csv", table) for table in ["bounds", "structured_cells"]],
        md=expand("<results>/tables/{table}.md", table=["bounds", "structured_cells"]),
    log:
        "<logs>/structured_tables.log",
    benchmark:
        "<benchmarks>/structured_tables.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(3000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        apart=APART,
        labels=LABELS,
        code=code("structured_tables.py"),
        locked=locked("structured_tables.py"),
    message:
        "judge the registered bounds"
    script:
        "../scripts/structured_tables.py"


rule structured_all:
    input:
        rules.structured_tables.output if STRUCTURED else [],
    message:
        "structured contexts are measured and judged"
