# Deployed methods as selectors of rows: what their kept sets lose beside max-mass's and the pool's (paper, section 4).
AUDITED = models_of("audit")


rule audit:
    input:
        model=expand("<resources>/models/{{model}}/{file}", file=MODEL_FILES),
        contexts="<results>/contexts/{model}/{arm}.json",
    output:
        "<results>/audit/{model}/{arm}.parquet",
    log:
        "<logs>/audit/{model}/{arm}.log",
    benchmark:
        "<benchmarks>/audit/{model}/{arm}.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(3000),
        gpu=int(config["device"] != "cpu"),
    params:
        settings={
            **{key: config["audit"][key] for key in ("positions", "budgets", "methods")},
            **{key: config["enumeration"][key] for key in ("families", "swap_keys")},
        },
        device=config["device"],
        code=code("audit.py"),
        locked=locked("audit.py"),
    message:
        "audit deployed methods on {wildcards.model}, {wildcards.arm}"
    script:
        "../scripts/audit.py"


rule audit_table:
    input:
        expand("<results>/audit/{model}/{arm}.parquet", model=AUDITED, arm=ARMS),
    output:
        csv=shown("<results>/tables/audit.csv", "audit"),
        md="<results>/tables/audit.md",
    log:
        "<logs>/audit_table.log",
    benchmark:
        "<benchmarks>/audit_table.tsv"
    conda:
        "../../envs/contourkv.yaml"
    resources:
        mem_mb=memory(3000),
    params:
        run=config["run"],
        statistics=config["statistics"],
        apart=APART,
        labels={model: LABELS[model] for model in AUDITED},
        code=code("audit_table.py"),
        locked=locked("audit_table.py"),
    message:
        "make the table of deployed methods"
    script:
        "../scripts/audit_table.py"


rule audit_all:
    input:
        rules.audit_table.output if AUDITED else [],
    message:
        "deployed methods are audited"
