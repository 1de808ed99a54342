"""The gRPC face: InferenceService and DecisionService."""
