"""The gRPC API: InferenceService and DecisionService."""
