// Quire from Go: a streamed answer within a deadline, a refusal by field, and a stream that is cancelled.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	inference "example.org/yours/gen/quire/inference/v1"
	types "example.org/yours/gen/quire/types/v1"
)

const patience = 30 * time.Second

func requestOf(question string, sampling *types.SamplingParams) *inference.GenerateRequest {
	chat := &inference.Chat{Messages: []*inference.ChatMessage{{Role: "user", Content: question}}}
	prompt := &inference.Prompt{Content: &inference.Prompt_Chat{Chat: chat}}
	return &inference.GenerateRequest{Input: &inference.GenerateRequest_Prompt{Prompt: prompt}, Sampling: sampling}
}

func wordOf(reason types.FinishReason) string {
	return strings.ToLower(strings.TrimPrefix(reason.String(), "FINISH_REASON_"))
}

// Each response has one event: Admitted, then Tokens as they are made, and at last Finished.
func answer(client inference.InferenceServiceClient, question string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sampling := &types.SamplingParams{Temperature: proto.Float32(0), MaxTokens: proto.Int32(32)}
	stream, err := client.Generate(ctx, requestOf(question, sampling))
	if err != nil {
		return err
	}
	workerID := ""
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		switch event := response.Event.(type) {
		case *inference.GenerateResponse_Admitted:
			workerID = event.Admitted.WorkerId
		case *inference.GenerateResponse_Tokens:
			fmt.Print(event.Tokens.Text)
		case *inference.GenerateResponse_Finished:
			finished := event.Finished
			fmt.Printf("\n%d tokens, %s, from %s\n", finished.Usage.OutputTokens, wordOf(finished.Reason), workerID)
		}
	}
}

// The details of a refusal name every wrong field.
func refusal(client inference.InferenceServiceClient, question string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sampling := &types.SamplingParams{Temperature: proto.Float32(-1), TopP: proto.Float32(2)}
	request := &inference.GenerateUnaryRequest{Request: requestOf(question, sampling)}
	_, err := client.GenerateUnary(ctx, request)
	for _, detail := range status.Convert(err).Details() {
		if wrong, ok := detail.(*errdetails.BadRequest); ok {
			for _, each := range wrong.FieldViolations {
				fmt.Printf("refused: %s %s\n", each.Field, each.Description)
			}
		}
	}
	if status.Code(err) != codes.InvalidArgument {
		return fmt.Errorf("not refused: %v", err)
	}
	return nil
}

func cancelled(client inference.InferenceServiceClient, question string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sampling := &types.SamplingParams{MaxTokens: proto.Int32(400), IgnoreEos: proto.Bool(true)}
	stream, err := client.Generate(ctx, requestOf(question, sampling))
	for err == nil {
		var response *inference.GenerateResponse
		if response, err = stream.Recv(); err != nil {
			break
		}
		if tokens := response.GetTokens(); ctx.Err() == nil && len(tokens.GetTokenIds()) > 0 {
			fmt.Printf("cancelled after %d tokens\n", len(tokens.TokenIds))
			cancel() // the worker stops within two steps and has its memory back
		}
	}
	if status.Code(err) != codes.Canceled {
		return fmt.Errorf("not cancelled: %v", err)
	}
	return nil
}

func main() {
	address, question := os.Args[1], os.Args[2]
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := inference.NewInferenceServiceClient(connection)
	for _, show := range []func(inference.InferenceServiceClient, string) error{answer, refusal, cancelled} {
		if err := show(client, question); err != nil {
			log.Fatal(err)
		}
	}
}
