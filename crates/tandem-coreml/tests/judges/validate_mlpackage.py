"""Validates ML Program packages on any system, without Tandem's code.

    python validate_mlpackage.py PACKAGE...

* the manifest, by Apple's libmodelpackage;
* the weight file: every record, and that every reference of the program names one of the right type and size;
* the interface against the signature of each function, which coremltools does not check;
* the type and shape of every operator, rebuilt through coremltools' own MIL builder, against what the program declares;
* a round trip through coremltools' backend (operator set, states, types).

Prints what is wrong; exit status 1 if anything is. Needs coremltools.
"""

import logging
import os
import struct
import sys

logging.disable(logging.CRITICAL)
import coremltools as ct
import numpy as np
from coremltools import proto
from coremltools.converters.mil._deployment_compatibility import AvailableTarget
from coremltools.converters.mil.converter import mil_convert
from coremltools.converters.mil.frontend.milproto.load import load as load_program
from coremltools.libmodelpackage import ModelPackage

ARRAY = {65552: "fp16", 65568: "fp32", 65600: "fp64", 131104: "int32", 131080: "int8"}
MIL = {
    1: "bool", 2: "string", 10: "fp16", 11: "fp32", 12: "fp64", 13: "bf16", 21: "int8", 22: "int16", 23: "int32",
    24: "int64", 25: "int4", 31: "uint8", 32: "uint16", 33: "uint32", 34: "uint64", 35: "uint4", 36: "uint2",
    37: "uint1", 38: "uint6", 39: "uint3", 40: "fp8e4m3fn", 41: "fp8e5m2",
}  # fmt: skip
# Of a weight file: MIL code and bits.
BLOB = {
    1: (10, 16), 2: (11, 32), 3: (31, 8), 4: (21, 8), 5: (13, 16), 6: (22, 16), 7: (32, 16), 8: (25, 4), 9: (37, 1),
    10: (36, 2), 11: (35, 4), 12: (39, 3), 13: (38, 6), 14: (23, 32), 15: (33, 32), 16: (40, 8), 17: (41, 8),
}  # fmt: skip
OPSET = {6: "CoreML5", 7: "CoreML6", 8: "CoreML7", 9: "CoreML8", 10: "CoreML9"}


def records(path):
    """(offset, type, bytes) of every record, and what is wrong with the file."""
    with open(path, "rb") as file:
        data = file.read()
    found, wrong = {}, []
    count, version = struct.unpack_from("<II", data, 0)
    if version != 2:
        wrong.append(f"weight file version {version}")
    at = 64
    for _ in range(count):
        at = (at + 63) // 64 * 64
        if at + 64 > len(data):
            wrong.append(f"record at {at} of {len(data)} bytes")
            break
        sentinel, kind, size, offset, padding = struct.unpack_from("<IIQQQ", data, at)
        if sentinel != 0xDEADBEEF or offset != at + 64 or offset + size > len(data) or kind not in BLOB or padding > 7:
            wrong.append(f"bad record at {at}")
            break
        found[at] = (kind, size, padding)
        at = offset + size
    if not wrong and at != len(data):
        wrong.append(f"{len(data) - at} bytes after the last record")
    return found, wrong


def all_ops(block):
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from all_ops(inner)


def check_blobs(spec, weights):
    wrong, files = [], {}
    for name in sorted(os.listdir(weights)) if os.path.isdir(weights) else []:
        files[name], bad = records(os.path.join(weights, name))
        wrong += [f"{name}: {what}" for what in bad]
    for fname, function in spec.mlProgram.functions.items():
        for block in function.block_specializations.values():
            for op in all_ops(block):
                inline = [b.value for a in op.inputs.values() for b in a.arguments if b.WhichOneof("binding") == "value"]
                for value in [*op.attributes.values(), *inline]:
                    if value.WhichOneof("value") != "blobFileValue":
                        continue
                    blob = value.blobFileValue
                    where = f"{fname}/{op.outputs[0].name}: weights at {blob.offset}"
                    record = files.get(blob.fileName.split("/")[-1], {}).get(blob.offset)
                    if record is None:
                        wrong.append(f"{where}: no record")
                        continue
                    kind, size, padding = record
                    mil, bits = BLOB[kind]
                    tensor = value.type.tensorType
                    elements = int(np.prod([d.constant.size for d in tensor.dimensions], dtype=np.int64))
                    if tensor.dataType != mil or elements * bits != size * 8 - padding:
                        wrong.append(f"{where}: {elements} of {MIL[tensor.dataType]}, stored {size} bytes of {MIL[mil]}")
    return wrong


def dims(tensor):
    return [d.constant.size if d.WhichOneof("dimension") == "constant" else None for d in tensor.dimensions]


def check_interface(spec):
    wrong = []
    description = spec.description
    described = {f.name: f for f in description.functions} or {"main": description}
    functions = spec.mlProgram.functions
    if set(described) != set(functions):
        return [f"functions {sorted(described)} are described, {sorted(functions)} are there"]
    if description.functions and description.defaultFunctionName not in functions:
        wrong.append(f"default function {description.defaultFunctionName!r} is not there")
    for name, interface in described.items():
        function = functions[name]
        inputs = {i.name: i.type for i in function.inputs}
        if function.opset != OPSET.get(spec.specificationVersion):
            wrong.append(f"{name}: operator set {function.opset} in specification {spec.specificationVersion}")
        if {i.name for i in interface.input} | {i.name for i in interface.state} != set(inputs):
            wrong.append(f"{name}: the interface and the function have different inputs")
            continue
        for item in interface.input:
            array, tensor = item.type.multiArrayType, inputs[item.name].tensorType
            shape = dims(tensor)
            fits = len(shape) == len(array.shape) and all(b is None or a == b for a, b in zip(array.shape, shape))
            if not fits or ARRAY[array.dataType] != MIL[tensor.dataType]:
                wrong.append(f"{name}: input {item.name} is {list(array.shape)} {ARRAY[array.dataType]}, not {shape} {MIL[tensor.dataType]}")
            flexible = array.WhichOneof("ShapeFlexibility")
            if flexible == "shapeRange":
                bounds = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
                for size, default, (low, high) in zip(shape, array.shape, bounds):
                    if (size is not None and (low, high) != (size, size)) or not low <= default or (high >= 0 and default > high):
                        wrong.append(f"{name}: input {item.name}: bounds {bounds} do not fit {shape}")
            elif None in shape and flexible is None:
                wrong.append(f"{name}: input {item.name} has an unknown dimension and no bounds")
        for item in interface.state:
            if inputs[item.name].WhichOneof("type") != "stateType":
                wrong.append(f"{name}: {item.name} is no state of the function")
                continue
            array, tensor = item.type.stateType.arrayType, inputs[item.name].stateType.wrappedType.tensorType
            if list(array.shape) != dims(tensor) or ARRAY[array.dataType] != MIL[tensor.dataType]:
                wrong.append(f"{name}: state {item.name} has another type in the function")
        block = function.block_specializations[function.opset]
        if [o.name for o in interface.output] != list(block.outputs):
            wrong.append(f"{name}: the interface and the function have different outputs")
        if not block.outputs:
            wrong.append(f"{name}: no outputs")
        results = {out.name: out.type.tensorType for op in block.operations for out in op.outputs}
        for item in interface.output:
            array, tensor = item.type.multiArrayType, results.get(item.name)
            if tensor is None:
                wrong.append(f"{name}: output {item.name} is no operator's result")
            elif ARRAY[array.dataType] != MIL[tensor.dataType] or (array.shape and list(array.shape) != dims(tensor)):
                wrong.append(f"{name}: output {item.name} has another type in the function")
    return wrong


def check_shapes(spec, program):
    """What coremltools infers for every result against what the program declares."""
    wrong = []
    for name, function in spec.mlProgram.functions.items():
        declared = {}
        for op in function.block_specializations[function.opset].operations:
            for out in op.outputs:
                if out.type.WhichOneof("type") == "tensorType":
                    declared[out.name] = (op.type, out.type.tensorType)
        for op in program.functions[name].operations:
            for out in op.outputs or []:
                if out.name not in declared or out.shape is None:
                    continue
                kind, tensor = declared[out.name]
                inferred = [None if not isinstance(s, (int, np.integer)) else int(s) for s in out.shape]
                if inferred != dims(tensor):
                    wrong.append(f"{name}/{out.name} ({kind}): declared {dims(tensor)}, inferred {inferred}")
    return wrong


def validate(package):
    if not ModelPackage.isValid(package):
        return ["libmodelpackage does not find it valid"]
    root = ModelPackage(package).getRootModel().path()
    spec = proto.Model_pb2.Model()
    try:
        with open(root, "rb") as file:
            spec.ParseFromString(file.read())
    except Exception as error:
        return [f"protobuf: {error}"]
    weights = os.path.join(os.path.dirname(root), "weights")
    wrong = check_blobs(spec, weights) + check_interface(spec)
    if wrong:
        return wrong
    try:
        program = load_program(spec, specification_version=spec.specificationVersion, file_weights_dir=weights)
        program.validate(check_essential_scope=False)
    except Exception as error:
        return [f"milproto: {type(error).__name__}: {error}"]
    wrong = check_shapes(spec, program)
    try:
        program.skip_all_passes = True
        several = {}
        if spec.description.defaultFunctionName:
            program.default_function_name = spec.description.defaultFunctionName
            program.export_as_multifunction = True
            several = {"export_multi_functions": True, "model_description": spec.description}
        mil_convert(
            program,
            convert_to="mlprogram",
            convert_from="milinternal",
            compute_units=ct.ComputeUnit.CPU_ONLY,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
            specification_version=spec.specificationVersion,
            minimum_deployment_target=AvailableTarget(spec.specificationVersion),
            **several,
        )
    except Exception as error:
        wrong.append(f"round trip: {type(error).__name__}: {error}")
    return wrong


if __name__ == "__main__":
    status = 0
    for path in sys.argv[1:]:
        errors = validate(path)
        print(path, "INVALID" if errors else "VALID")
        for error in errors:
            print("   -", error)
        status |= bool(errors)
    sys.exit(status)
