#!/usr/bin/env python3
"""Runs a batch on a Spark cluster. Each partition is one `gemma generate --batch`, which loads the
model once.

  spark-submit scripts/spark_batch.py IN.jsonl OUT_DIRECTORY [--partitions N] [--gemma PATH] [--
  OPTIONS OF gemma generate]

Every record needs an "id" (or "custom_id"). Seeds come from ids, so that a record has the same text
in any partition, and answers are found by them. A line of invalid JSON is answered by an error, as
in any batch; its id is its number in the partition. If the process of a partition fails, the job
fails: without checkCode, Spark would treat it as an empty result. gemma and the model must be at
the same path on every worker."""
import argparse
import json
import shlex
import sys

from pyspark.sql import SparkSession


def arguments():
    own, options = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument(
        "--partitions", type=int, default=2,
        help="number of processes: as many as models fit in the cluster's memory",
    )
    parser.add_argument("--gemma", default="gemma", help="path of the binary on the workers")
    return parser.parse_args(own), options


def with_id(line):
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or record.get("id", record.get("custom_id")) is None:
        raise ValueError(f"a record without id: {line[:80]}")
    return line


def main():
    typed, options = arguments()
    command = shlex.join([typed.gemma, "generate", "--batch", "-", "-q", *options])
    spark = SparkSession.builder.appName("gemma batch").getOrCreate()
    lines = spark.sparkContext.textFile(
        typed.input, typed.partitions
    ).filter(lambda line: line.strip()).map(with_id)
    # textFile treats its number as a minimum, but there has to be one process per partition.
    lines.repartition(typed.partitions).pipe(command, checkCode=True).saveAsTextFile(typed.output)
    spark.stop()


if __name__ == "__main__":
    main()
