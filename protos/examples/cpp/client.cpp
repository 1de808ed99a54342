// Quire from C++: a streamed answer within a deadline, a refusal by field, and a stream that is cancelled.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include "google_rpc.pb.h"
#include "quire/inference/v1/inference.grpc.pb.h"

namespace inference = quire::inference::v1;
namespace types = quire::types::v1;

using Stub = inference::InferenceService::Stub;

inference::GenerateRequest request_of(const std::string& question) {
    inference::GenerateRequest request;
    auto* message = request.mutable_prompt()->mutable_chat()->add_messages();
    message->set_role("user");
    message->set_content(question);
    return request;
}

void expire_in(grpc::ClientContext& context, std::chrono::seconds seconds) {
    context.set_deadline(std::chrono::system_clock::now() + seconds);
}

std::string word_of(types::FinishReason reason) {
    auto word = types::FinishReason_Name(reason).substr(std::string("FINISH_REASON_").size());
    std::transform(word.begin(), word.end(), word.begin(), [](unsigned char letter) { return std::tolower(letter); });
    return word;
}

// Each response is one event: `admitted`, then `tokens` as they are made, and at last `finished`.
grpc::Status answer(Stub& stub, const std::string& question) {
    auto request = request_of(question);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_max_tokens(32);
    grpc::ClientContext context;
    expire_in(context, std::chrono::seconds(30));
    auto reader = stub.Generate(&context, request);
    std::string worker_id;
    for (inference::GenerateResponse response; reader->Read(&response);) {
        if (response.has_admitted()) {
            worker_id = response.admitted().worker_id();
        } else if (response.has_tokens()) {
            std::cout << response.tokens().text() << std::flush;
        } else if (response.has_finished()) {
            const auto& finished = response.finished();
            std::cout << "\n" << finished.usage().output_tokens() << " tokens, " << word_of(finished.reason())
                      << ", from " << worker_id << std::endl;
        }
    }
    return reader->Finish();
}

// The details of a failed call are a google.rpc.Status; each of them is packed with the name of its type.
void refusal(Stub& stub, const std::string& question) {
    inference::GenerateUnaryRequest unary;
    *unary.mutable_request() = request_of(question);
    unary.mutable_request()->mutable_sampling()->set_temperature(-1);
    unary.mutable_request()->mutable_sampling()->set_top_p(2);
    grpc::ClientContext context;
    expire_in(context, std::chrono::seconds(30));
    inference::GenerateUnaryResponse response;
    const auto status = stub.GenerateUnary(&context, unary, &response);
    google::rpc::Status rich;
    rich.ParseFromString(status.error_details());
    google::rpc::BadRequest bad;
    for (const auto& detail : rich.details()) {
        if (!detail.UnpackTo(&bad)) continue;
        for (const auto& violation : bad.field_violations()) {
            std::cout << "refused: " << violation.field() << " " << violation.description() << std::endl;
        }
    }
}

// The worker stops within two steps of TryCancel and has its memory back; what comes until then is thrown away.
grpc::Status cancel(Stub& stub, const std::string& question) {
    auto request = request_of(question);
    request.mutable_sampling()->set_max_tokens(400);
    request.mutable_sampling()->set_ignore_eos(true);
    grpc::ClientContext context;
    expire_in(context, std::chrono::seconds(30));
    auto reader = stub.Generate(&context, request);
    inference::GenerateResponse response;
    while (reader->Read(&response) && response.tokens().token_ids().empty()) {
    }
    std::cout << "cancelled after " << response.tokens().token_ids_size() << " tokens" << std::endl;
    context.TryCancel();
    while (reader->Read(&response)) {
    }
    return reader->Finish();
}

int main(int count, char** words) {
    if (count != 3) {
        std::cerr << "usage: client ADDRESS QUESTION" << std::endl;
        return 2;
    }
    const auto stub = inference::InferenceService::NewStub(
        grpc::CreateChannel(words[1], grpc::InsecureChannelCredentials()));
    if (const auto status = answer(*stub, words[2]); !status.ok()) {
        std::cerr << status.error_code() << ": " << status.error_message() << std::endl;
        return 1;
    }
    refusal(*stub, words[2]);
    return cancel(*stub, words[2]).error_code() == grpc::StatusCode::CANCELLED ? 0 : 1;
}
