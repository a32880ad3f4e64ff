// Streams a completion. Usage: pagewire_generate HOST:PORT [generate | cancel | deadline | error]
//   cancel     ends the stream after the first text
//   deadline   gives the request 20 ms
//   error      asks for an impossible temperature and shows the error's details
#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "error_details.pb.h"
#include "pagewire/v1/inference.grpc.pb.h"

namespace {

const char* name_of(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::OK: return "OK";
    case grpc::StatusCode::CANCELLED: return "CANCELLED";
    case grpc::StatusCode::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::UNAVAILABLE: return "UNAVAILABLE";
    default: return "another code";
  }
}

void show(const grpc::Status& status) {
  std::cerr << name_of(status.error_code()) << ": " << status.error_message() << '\n';
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return;
  for (const auto& detail : details.details()) {
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&bad)) {
      for (const auto& violation : bad.field_violations())
        std::cerr << violation.field() << ": " << violation.description() << '\n';
    } else if (detail.UnpackTo(&retry)) {
      std::cerr << "retry after " << retry.retry_delay().seconds() << " s\n";
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string target = argc > 1 ? argv[1] : "127.0.0.1:50051";
  const std::string mode = argc > 2 ? argv[2] : "generate";
  auto channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
  auto stub = pagewire::v1::InferenceService::NewStub(channel);

  pagewire::v1::GenerateRequest request;
  request.set_text("The capital of France is");
  request.mutable_sampling()->set_max_tokens(mode == "generate" ? 16 : 200);
  request.mutable_sampling()->set_temperature(mode == "error" ? -1.0F : 0.0F);
  request.mutable_sampling()->set_ignore_eos(mode != "generate");

  grpc::ClientContext context;
  if (mode == "deadline") context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
  auto stream = stub->Generate(&context, request);
  pagewire::v1::GenerateResponse message;
  while (stream->Read(&message)) {
    std::cout << message.text() << std::flush;
    if (mode == "cancel" && !message.text().empty()) context.TryCancel();
  }
  const grpc::Status status = stream->Finish();
  std::cout << '\n';
  if (status.ok()) return 0;
  show(status);
  return 1;
}
